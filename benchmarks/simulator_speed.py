"""How long the simulator takes on large clusters, in one process: seconds, and how much memory grows with the run.

Half of the workers are twice as fast as the others, and all have ten per cent of noise; nothing is written down but the
summaries. Of the long runs a tenth is run and the figure scaled up, since iterations take as long as those before them;
`--whole` runs them to their end. `--quick` runs a hundredth of everything, which a warm cache flatters.
"""

import gc
import resource
import sys
import time

from harness import record

from evenstep.cluster import parse_cluster
from evenstep.schemes import parse_scheme
from evenstep.sim import Scenario, simulate

SCHEMES = ("lb-bsp", "lb-bsp:predictor=ema", "ssp", "dssp", "asp")
RUNS = {"wide": (10_000, 100, 10.0), "long": (1_000, 10_000, 120.0)}
"""Workers, iterations, and the seconds that a run may take."""
PARTS = {"long": 10}
"""Of these one is run."""
PER_WORKER = 32


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--whole", action="store_true", help="run the long runs to their end too")
    options = parser.parse_args()
    parts = dict.fromkeys(RUNS, 100) if options.quick else {} if options.whole else PARTS
    raw, figures = {}, []
    for name, (workers, iterations, limit) in RUNS.items():
        part = parts.get(name, 1)
        for scheme in SCHEMES:
            label = f"{name}, {workers} workers x {iterations} iterations, {scheme}"
            measured = _measure(workers, iterations, scheme, part)
            record.console.print(f"  {label}: {measured['seconds']:.1f} s")
            raw[label] = [measured]
            figures.append(record.figure(label, [measured["seconds"]], goal=f"<= {limit:g}", unit="s"))
    done = record.publish(
        "simulator_speed",
        "Seconds to simulate large clusters, by scheme",
        options,
        config={"samples_per_worker": PER_WORKER, "noise": "10 %", "schemes": SCHEMES, "run_one_part_of": parts},
        figures=figures,
        raw=raw,
    )
    return 0 if done else 1


def _measure(workers, iterations, scheme, part):
    """Seconds of the whole run, worked out from a part of its iterations, or of its workers where those are few."""
    if part > 1 and iterations <= part:
        workers //= part
    elif part > 1:
        iterations //= part
    scenario = Scenario(
        cluster=_cluster(workers),
        scheme=parse_scheme(scheme),
        global_batch_size=PER_WORKER * workers,
        iterations=iterations,
    )
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    result = simulate(scenario)
    seconds = time.perf_counter() - began
    return {
        "seconds": part * seconds,
        "microseconds_per_push": 1e6 * seconds / sum(worker.iterations for worker in result.workers),
        "grown_kilobytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before,
        "samples_per_second": result.samples_per_second,
    }


def _cluster(workers):
    return parse_cluster(
        f"""
        [devices.fast]
        fixed = "5 ms"
        per_sample = "1 ms"
        [devices.slow]
        fixed = "5 ms"
        per_sample = "2 ms"
        [disturbances.noise]
        kind = "jitter"
        spread = "10 %"
        [[workers]]
        device = "fast"
        disturb = ["noise"]
        count = {workers // 2}
        [[workers]]
        device = "slow"
        disturb = ["noise"]
        count = {workers // 2}
        """
    )


if __name__ == "__main__":
    sys.exit(main())
