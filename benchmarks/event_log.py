"""What the event log costs a worker in each iteration, beside iterations of 100 ms.

The worker computes in between, so that the caches are not those of a tight loop. An iteration writes its event and,
where the script notes its loss in every one, a second; the changes of plan that are written now and then cost less.
Own time is the thread's; by the clock, whatever others take of its core counts too.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from harness import record

from evenstep.core.samples import Share
from evenstep.core.values import Reports
from evenstep.telemetry import JsonlRecorder
from evenstep.telemetry.events import Noted
from evenstep.worker.iteration import Iteration

ITERATION_SECONDS = 0.1
GOAL_PERCENT = 0.5
WORKERS = 16
COMPUTE_SECONDS = 0.002
SAMPLES, PARTS = 200, 5


def main():
    options = record.arguments(__doc__).parse_args()
    parts, samples = (1, 30) if options.quick else (PARTS, SAMPLES)
    torch.set_num_threads(1)
    raw = {"iteration": [], "iteration and note": []}
    for _ in range(parts):
        with tempfile.TemporaryDirectory() as folder:
            recorder = JsonlRecorder(Path(folder), 0)
            raw["iteration"].append(_measure(recorder, samples, notes=False))
            raw["iteration and note"].append(_measure(recorder, samples, notes=True))
            recorder.close()
    figures = []
    for name, each in raw.items():
        for what, statistic, goal in (
            ("own time, mean", lambda part: np.mean(part, axis=0)[0], f"<= {GOAL_PERCENT}"),
            ("median", lambda part: np.median(part, axis=0)[1], f"<= {GOAL_PERCENT}"),
            ("99th percentile", lambda part: np.percentile(part, 99, axis=0)[1], None),
        ):
            shares = [100 * float(statistic(part)) / ITERATION_SECONDS for part in each]
            figures.append(record.figure(f"{name}: {what}", shares, goal=goal, unit="%"))
    done = record.publish(
        "event_log",
        "What the event log costs, of an iteration of 100 ms",
        options,
        config={
            "iteration_seconds": ITERATION_SECONDS, "workers": WORKERS, "iterations_per_part": samples, "parts": parts,
            "compute_between_seconds": COMPUTE_SECONDS,
        },
        figures=figures,
        raw={name: [np.round(1e6 * np.array(part), 2).tolist() for part in each] for name, each in raw.items()},
    )  # fmt: skip
    return 0 if done else 1


def _measure(recorder, samples, *, notes):
    """What making and writing an iteration's events takes: seconds of this thread's own, and by the clock."""
    reports = Reports.from_table(np.full((WORKERS, Reports.columns()), 20_000, dtype=np.int64))
    sizes = np.full(WORKERS, 32, dtype=np.int64)
    share = Share(iteration=0, positions=tuple(range(32)), samples=32, sizes=sizes, ends_epoch=False)
    taken = []
    for number in range(samples):
        _compute()
        now = Iteration(
            number=number, epoch=0, share=share, piece=share, batch_sizes=[32], samples=32, passes=1,
            load=32.0, entered=time.perf_counter(), input_seconds=0.001, synchronised_seconds=0.03,
        )  # fmt: skip
        own, began = time.thread_time(), time.perf_counter()
        recorder.record(now.event(reports, 0, began + ITERATION_SECONDS))
        if notes:
            values = {"loss": 1.0 / (number + 1)}
            recorder.record(Noted(worker=0, iteration=number, at=began, samples=32, values=values))
        taken.append((time.thread_time() - own, time.perf_counter() - began))
    return taken


def _compute():
    until, values = time.thread_time() + COMPUTE_SECONDS, torch.rand(256, 256)
    while time.thread_time() < until:
        values = torch.tanh(values @ values)


if __name__ == "__main__":
    sys.exit(main())
