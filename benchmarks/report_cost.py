"""What a report on a long run takes: 16 workers with 100,000 iterations each, from the event log to the page.

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

WORKERS, ITERATIONS, SIZE = 16, 100_000, 32
PER_EPOCH = 1000
LIMIT_SECONDS, LIMIT_MEGABYTES = 60, 20


def main():
    options = record.arguments(__doc__).parse_args()
    iterations = ITERATIONS // 100 if options.quick else ITERATIONS
    with tempfile.TemporaryDirectory() as folder:
        size = _write(Path(folder), iterations, options.seed)
        began = time.process_time()
        run = read_run(Path(folder))
        read = time.process_time()
        page = page_html([overview_of("run", run)], version=evenstep.__version__)
        ended = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    done = record.publish(
        "report_cost",
        "A report on a long run: 16 workers, 100,000 iterations each",
        options,
        config={"workers": WORKERS, "iterations": iterations},
        figures=[
            record.figure("event log", [size / 1e6], unit="MB"),
            record.figure("reading it", [read - began], unit="s"),
            record.figure("the page from that", [ended - read], unit="s"),
            record.figure("both", [ended - began], goal=f"<= {LIMIT_SECONDS}", unit="s"),
            record.figure("the page", [len(page) / 1e6], goal=f"<= {LIMIT_MEGABYTES}", unit="MB"),
            record.figure("peak memory, log not included", [peak], unit="MB"),
        ],
        raw=None,
    )
    return 0 if done else 1


def _write(folder, iterations, seed):
    """Write the log of every worker; its bytes."""
    draw = np.random.default_rng(seed)
    speeds = 1 + 0.2 * (np.arange(WORKERS) % 4)
    compute = 0.003 * SIZE * speeds[:, np.newaxis] * (1 + 0.1 * draw.random((WORKERS, iterations)))
    longest = compute.max(axis=0)
    began = np.concatenate([[0.0], np.cumsum(longest + 0.004)[:-1]])
    size = 0
    for worker in range(WORKERS):
        path = folder / f"worker-{worker}.jsonl"
        with path.open("w") as file:
            for event in _events(worker, compute[worker], longest, began):
                file.write(json.dumps({"worker": worker, **event}, separators=(",", ":")) + "\n")
        size += path.stat().st_size
    return size


def _events(worker, compute, longest, began):
    yield {
        "event": "run", "schema": 2, "at": 0.0, "unix_seconds": 1e9, "workers": WORKERS, "scheme": "bsp",
        "engine": "collective", "global_batch_size": SIZE * WORKERS, "iterations_per_epoch": PER_EPOCH,
    }  # fmt: skip
    yield {"event": "plan", "iteration": 0, "batch_sizes": [SIZE] * WORKERS}
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
