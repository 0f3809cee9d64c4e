import io

import pytest
from rich.console import Console

ITERATIONS = 12
PER_EPOCH = 6
SECONDS_PER_SAMPLE = (0.001, 0.001, 0.004)


@pytest.fixture
def events_of():
    """The events of a small made-up run: 3 workers, the last four times slower, half of the last slice missing."""

    def events(scheme, *plans):
        sizes = [plans[min(number, len(plans) - 1)] for number in range(ITERATIONS)]
        for number in (PER_EPOCH - 1, ITERATIONS - 1):
            sizes[number] = tuple(size // 2 for size in sizes[number])
        for worker, per_sample in enumerate(SECONDS_PER_SAMPLE):
            yield {
                "event": "run",
                "worker": worker,
                "scheme": scheme,
                "global_batch_size": sum(plans[0]),
                "iterations_per_epoch": PER_EPOCH,
            }
            for plan in plans:
                yield {"event": "plan", "worker": worker, "batch_sizes": list(plan)}
            began = 0.0
            for number, plan in enumerate(sizes):
                longest = max(size * each for size, each in zip(plan, SECONDS_PER_SAMPLE, strict=True))
                yield {
                    "event": "iteration",
                    "worker": worker,
                    "iteration": number,
                    "at": began,
                    "samples": plan[worker],
                    "iteration_seconds": longest + 0.010,
                    "input_seconds": 0.002,
                    "compute_seconds": plan[worker] * per_sample,
                    "wait_seconds": longest - plan[worker] * per_sample,
                    "comm_seconds": 0.008,
                }
                began += longest + 0.010

    return events


@pytest.fixture
def text_of():
    """What a terminal of 100 columns shows of something."""

    def text(renderable):
        console = Console(width=100, file=io.StringIO())
        console.print(renderable)
        return console.file.getvalue()

    return text
