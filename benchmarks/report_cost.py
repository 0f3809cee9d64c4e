"""What a report on a long or wide run takes, from the event log to the page.

The log is made up (four speeds with jitter), since nothing of what is measured depends on where it comes from. Seconds
are the process's own.
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import record

import evenstep
from evenstep.report.overview import overview_of
from evenstep.report.page import page_html
from evenstep.report.recorded import read_run

SIZE, PER_EPOCH = 32, 1000
# Workers, iterations and the seconds that both may take.
CASES = ((16, 100_000, 60), (64, 10_000, 5))
LIMIT_MEGABYTES = 20


def main():
    options = record.arguments(__doc__).parse_args()
    figures = []
    for workers, iterations, limit in CASES:
        figures += _figures(workers, iterations // 100 if options.quick else iterations, limit, options.seed)
    # Of the whole process, so of the larger log.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    done = record.publish(
        "report_cost",
        "A report on a long run and on a wide one",
        options,
        config={"cases": CASES},
        figures=[*figures, record.figure("peak memory, logs not included", [peak], unit="MB")],
        raw=None,
    )
    return 0 if done else 1


def _figures(workers, iterations, limit, seed):
    with tempfile.TemporaryDirectory() as folder:
        size = _write(Path(folder), workers, iterations, seed)
        began = time.process_time()
        run = read_run(Path(folder))
        read = time.process_time()
        page = page_html([overview_of("run", run)], version=evenstep.__version__)
        ended = time.process_time()
    case = f"{workers} workers, {iterations:,} iterations each"
    return [
        record.figure(f"{case}: event log", [size / 1e6], unit="MB"),
        record.figure(f"{case}: reading it", [read - began], unit="s"),
        record.figure(f"{case}: the page from that", [ended - read], unit="s"),
        record.figure(f"{case}: both", [ended - began], goal=f"<= {limit}", unit="s"),
        record.figure(f"{case}: the page", [len(page) / 1e6], goal=f"<= {LIMIT_MEGABYTES}", unit="MB"),
    ]


def _write(folder, workers, iterations, seed):
    """Write the log of every worker; its bytes."""
    draw = np.random.default_rng(seed)
    speeds = 1 + 0.2 * (np.arange(workers) % 4)
    compute = 0.003 * SIZE * speeds[:, np.newaxis] * (1 + 0.1 * draw.random((workers, iterations)))
    longest = compute.max(axis=0)
    began = np.concatenate([[0.0], np.cumsum(longest + 0.004)[:-1]])
    size = 0
    for worker in range(workers):
        path = folder / f"worker-{worker}.jsonl"
        with path.open("w") as file:
            for event in _events(worker, workers, compute[worker], longest, began):
                file.write(json.dumps({"worker": worker, **event}, separators=(",", ":")) + "\n")
        size += path.stat().st_size
    return size


def _events(worker, workers, compute, longest, began):
    yield {
        "event": "run", "schema": 2, "at": 0.0, "unix_seconds": 1e9, "workers": workers, "scheme": "bsp",
        "engine": "collective", "global_batch_size": SIZE * workers, "iterations_per_epoch": PER_EPOCH,
    }  # fmt: skip
    yield {"event": "plan", "iteration": 0, "batch_sizes": [SIZE] * workers}
    for number, (mine, slowest, at) in enumerate(zip(compute.tolist(), longest.tolist(), began.tolist(), strict=True)):
        yield {
            "event": "iteration", "iteration": number, "epoch": number // PER_EPOCH, "at": at, "samples": SIZE,
            "iteration_seconds": slowest + 0.004, "input_seconds": 0.0005, "compute_seconds": mine,
            "wait_seconds": slowest - mine, "comm_seconds": 0.0025,
            "report": [SIZE, round(1e6 * mine), round(1e9 * mine / SIZE), 0, 100, 0, 2**31 - 1],
            "factors": [1.0, 1.0, 1.0, 1.0],
        }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
