"""Workers of lasting unlike speeds in each framework: lb-bsp and equal sizes, beside the ideal."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import clusters, interpreters, record
from harness.framework_worker import BATCH, WORKERS

from evenstep.telemetry import read_events
from evenstep.telemetry.events import IterationDone

ROOT = Path(__file__).parents[1]
SPEEDS, IDEAL, WARMUP = (1, 1, 2, 4), 0.2, 10
SCHEMES = {"lb-bsp": 50, "bsp": 30}
"""Iterations of each."""
GOALS = {"torch": None, "tensorflow": ">= 0.93", "jax": ">= 0.93", "mxnet": ">= 0.9"}


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--frameworks", nargs="+", choices=GOALS, default=list(GOALS))
    parser.add_argument("--repetitions", type=int, default=3)
    interpreters.add_argument(parser)
    options = parser.parse_args()
    pythons = {"torch": sys.executable} | interpreters.named(options, [name for name in GOALS if name != "torch"])
    for name in options.frameworks:
        if not Path(pythons[name]).exists():
            parser.error(f"there is no {pythons[name]}: run make test-all, or give --python {name}=PATH")
    repetitions = 1 if options.quick else options.repetitions
    lengths = dict.fromkeys(SCHEMES, WARMUP + 6) if options.quick else SCHEMES
    raw = {(name, scheme): [] for name in options.frameworks for scheme in SCHEMES}
    for _ in range(repetitions):
        for name, scheme in raw:
            found = measured(name, scheme, lengths[scheme], pythons[name])
            raw[name, scheme].append(found)
            record.console.print(f"  {name}, {scheme}: {found['samples_per_second'] * IDEAL / BATCH:.3f} of the ideal")
    figures = []
    for name in options.frameworks:
        balanced, equal = ([each["samples_per_second"] for each in raw[name, scheme]] for scheme in SCHEMES)
        of_ideal = [rate * IDEAL / BATCH for rate in balanced]
        gains = [ours / theirs for ours, theirs in zip(balanced, equal, strict=True)]
        figures += [
            record.figure(f"{name}: of the ideal samples/s", of_ideal, goal=GOALS[name]),
            record.figure(f"{name}: times equal sizes", gains, goal=">= 1.8"),
        ]
    by_variant = {f"{name}, {scheme}": each for (name, scheme), each in raw.items()}
    done = record.publish(
        "frameworks",
        f"{WORKERS} workers, speeds {':'.join(map(str, SPEEDS))}, ideal {IDEAL:g} s, in each framework",
        options,
        config={
            "speeds": SPEEDS,
            "global_batch_size": BATCH,
            "ideal_seconds": IDEAL,
            "iterations": lengths,
            "warmup": WARMUP,
            "repetitions": repetitions,
        },
        figures=figures,
        raw=by_variant,
        overrun=record.overruns(by_variant),
    )
    return 0 if done else 1


def measured(name, scheme, iterations, python):
    """Settled samples/s of all workers, and how many iterations overran their emulated time on any worker."""
    curves = clusters.proportional(SPEEDS, BATCH, IDEAL)
    with tempfile.TemporaryDirectory() as folder:
        cluster, run_dir = Path(folder, "cluster.toml"), Path(folder, "run")
        cluster.write_text(
            "".join(
                f'[devices.d{rank}]\nper_sample = "{curve.seconds_per_sample * 1e3} ms"\n'
                for rank, curve in enumerate(curves)
            )
            + "".join(f'[[workers]]\ndevice = "d{rank}"\n' for rank in range(WORKERS))
        )
        command = [sys.executable, "-m", "evenstep", "run", "--workers", str(WORKERS), "--scheme", scheme]
        command += ["--emulate", str(cluster), "--run-dir", str(run_dir)]
        command += [] if name == "torch" else ["--framework", name, "--no-python", python]
        worker = ROOT / "benchmarks/harness/framework_worker.py"
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
        subprocess.run([*command, str(worker), name, str(iterations)], check=True, env=environment)
        done = [each for each in read_events(run_dir, kind=IterationDone) if each.iteration >= WARMUP]
    seconds = sum(each.iteration_seconds for each in done if each.worker == 0)
    late = {
        each.iteration
        for each in done
        if each.compute_seconds > curves[each.worker].seconds(each.samples) * 1.01 + 1e-3
    }
    return {
        "samples_per_second": sum(each.samples for each in done) / seconds,
        "iterations": iterations - WARMUP,
        "overrun_iterations": len(late),
    }


if __name__ == "__main__":
    sys.exit(main())
