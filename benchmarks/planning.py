"""How long it takes to decide, in one process: what every worker does in every iteration beside training.

"Deciding" is to take in everybody's reports and to allocate; "assigning samples" is to
find this worker's part of the next slice.

Reports of simulated workers whose speeds are unlike and noisy; nothing changes ("stay"), some workers change speed
every 20 iterations ("change"), or all in every iteration, so that all sizes move every time ("move", the worst case).
"""

import sys
import time

import numpy as np
from harness import record

from evenstep.core.samples import Ledger, Lookahead
from evenstep.core.values import UNLIMITED, Problem, Reports
from evenstep.schemes import parse_scheme

PER_WORKER = 32
LIMITS = {16: 0.1, 10_000: 5.0}
CHANGES = {0: "stay", 20: "change", 1: "move"}
"""How the speeds change: after how many iterations (0: never), and the word for it."""
PASSES = 5
"""Parts of a run, so that a figure shows how much it scatters."""


def main():
    options = record.arguments(__doc__).parse_args()
    iterations = {16: 2000, 10_000: 200}
    if options.quick:
        iterations = {16: 200, 10_000: 25}
    raw, figures = {}, []
    for workers, limit in LIMITS.items():
        for fixed in (False, True):
            for every in CHANGES:
                name = f"{workers}, {'fixed part' if fixed else 'no fixed part'}, sizes {CHANGES[every]}"
                record.console.print(f"  {name}")
                parts = [
                    _measure(workers, fixed, every, iterations[workers] // PASSES, options.seed + part)
                    for part in range(PASSES)
                ]
                raw[name] = parts
                figures += _figures(name, parts, limit)
    done = record.publish(
        "planning",
        "Planning time of one iteration on one worker, by the number of workers",
        options,
        config={"samples_per_worker": PER_WORKER, "iterations": iterations, "passes": PASSES},
        figures=figures,
        raw=raw,
    )
    return 0 if done else 1


def _figures(name, parts, limit):
    def of(key):
        return [part[key] for part in parts]

    return [
        record.figure(f"{name}: deciding, mean", of("deciding_mean_ms"), goal=f"<= {limit:g}", unit="ms"),
        record.figure(f"{name}: deciding, median", of("deciding_median_ms"), unit="ms"),
        record.figure(f"{name}: deciding, 99th percentile", of("deciding_p99_ms"), unit="ms"),
        record.figure(f"{name}: assigning samples, median", of("samples_median_ms"), unit="ms"),
        record.figure(f"{name}: assigning samples, 99th percentile", of("samples_p99_ms"), unit="ms"),
    ]


def _measure(workers, fixed, every, iterations, seed):
    random = np.random.default_rng(seed)
    load = parse_scheme("lb-bsp").load
    policy = load.policy(workers)
    batch = PER_WORKER * workers
    problem = Problem(
        global_batch_size=batch,
        minimum=np.ones(workers, dtype=np.int64),
        maximum=np.full(workers, UNLIMITED, dtype=np.int64),
    )
    rates = random.uniform(1e6, 4e6, workers)
    sizes = policy.allocate(problem).sizes
    lookahead = Lookahead(
        Ledger(length=batch * (iterations + 2), global_batch_size=batch), worker=0, sizes=lambda: sizes, depth=0
    )
    deciding, sampling, moved = [], [], 0
    for iteration in range(iterations + 1):
        if every and iteration % every == 0:
            rates = rates * random.choice([0.5, 1.0, 2.0], workers)
            rates = np.clip(rates, 1e6, 4e6)
        before = sizes
        reports = _reports(random, rates, before, fixed)
        began = time.perf_counter()
        policy.observe(reports)
        sizes = policy.allocate(problem).sizes
        decided = time.perf_counter()
        lookahead.replan()
        lookahead.share()
        lookahead.advance()
        done = time.perf_counter()
        # The first decision leaves equal sizes for unlike speeds, which moves all in either mode.
        if iteration:
            deciding.append(decided - began)
            sampling.append(done - decided)
            moved += not np.array_equal(sizes, before)
    return {
        "iterations": iterations,
        "deciding_mean_ms": 1000 * float(np.mean(deciding)),
        "deciding_median_ms": 1000 * float(np.median(deciding)),
        "deciding_p99_ms": 1000 * float(np.percentile(deciding, 99)),
        "samples_median_ms": 1000 * float(np.median(sampling)),
        "samples_p99_ms": 1000 * float(np.percentile(sampling, 99)),
        "moved": moved / iterations,
    }


def _reports(random, rates, sizes, fixed):
    """What the workers would report: rates known to 0.1 %, as after some tens of iterations."""
    workers = len(rates)
    per_sample = (rates * random.normal(1.0, 0.001, workers)).astype(np.int64)
    fixed_part = (per_sample * 5.0).astype(np.int64) if fixed else np.zeros(workers, dtype=np.int64)
    return Reports(
        samples=sizes,
        compute_microseconds=(fixed_part + per_sample * sizes) // 1000,
        forecast=np.zeros(workers, dtype=np.int64),
        largest_size=np.full(workers, UNLIMITED, dtype=np.int64),
    )


if __name__ == "__main__":
    sys.exit(main())
