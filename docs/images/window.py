"""Stretches of runs, laid out in time: the same iterations of several runs, or some seconds of one."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

import numpy as np

from evenstep.report.iterations import Iterations
from evenstep.report.recorded import RecordedRun

_SLOW_FROM = 1.5
"""An iteration with this many times the usual seconds per sample is drawn as a slow one."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One worker's iteration; the times in seconds since the stretch began."""

    samples: int
    slow: bool
    compute_began: float
    compute_ended: float
    wait_ended: float
    ended: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A part of one run: `lanes[worker]` in order, `seconds` from the first start to the last end."""

    lanes: Mapping[int, tuple[Span, ...]]
    seconds: float


def same_window(runs: Sequence[RecordedRun], iterations: int) -> list[Window] | None:
    """The same so many iterations of each run, None where they have none in common.

    Only full iterations count, from the second half of the runs, where the sizes have settled; of
    all such stretches the one whose durations come closest to each run's median.
    """
    length = min(run.length for run in runs)
    starts = [
        start
        for start in range(length // 2, length - iterations + 1)
        if all(_is_usual(run, number) for run in runs for number in range(start, start + iterations))
    ]
    if not starts:
        return None
    durations = [[_duration(run, start, iterations) for start in starts] for run in runs]
    usual = [median(each) for each in durations]

    def oddness(index: int) -> float:
        return sum(abs(math.log(each[index] / middle)) for each, middle in zip(durations, usual, strict=True))

    start = starts[min(range(len(starts)), key=oddness)]
    return [_window(run, start, iterations) for run in runs]


def between(run: RecordedRun, start: float, seconds: float) -> Window:
    """What the workers did in so many seconds from `start` on, each where its own clock has it."""
    usual = _usual(run)
    lanes = {}
    for worker, done in run.iterations.items():
        began = done.began - start
        inside = np.flatnonzero((began < seconds) & (began + done.iteration_seconds > 0))
        lanes[worker] = tuple(_span(done, number, began[number], usual) for number in inside)
    return Window(lanes=lanes, seconds=seconds)


def _is_usual(run: RecordedRun, number: int) -> bool:
    return sum(each.samples[number] for each in run.iterations.values()) == run.global_batch_size


def _duration(run: RecordedRun, start: int, iterations: int) -> float:
    return sum(_longest(run, number) for number in range(start, start + iterations))


def _longest(run: RecordedRun, number: int) -> float:
    return max(float(done.iteration_seconds[number]) for done in run.iterations.values())


def _window(run: RecordedRun, start: int, iterations: int) -> Window:
    """Laid out so that all workers begin an iteration together, which is what a barrier makes them do."""
    lanes: dict[int, list[Span]] = {worker: [] for worker in run.workers}
    usual = _usual(run)
    began = 0.0
    for number in range(start, start + iterations):
        for worker, spans in lanes.items():
            spans.append(_span(run.iterations[worker], number, began, usual))
        began += _longest(run, number)
    return Window(lanes={worker: tuple(spans) for worker, spans in lanes.items()}, seconds=began)


def _usual(run: RecordedRun) -> float:
    """The fastest worker's seconds per sample."""
    return min(median(done.compute_seconds / np.maximum(done.measured, 1)) for done in run.iterations.values())


def _span(done: Iterations, number: int, began: float, usual: float) -> Span:
    compute_began = began + float(done.input_seconds[number])
    compute_ended = compute_began + float(done.compute_seconds[number])
    ended = max(began + float(done.iteration_seconds[number]), compute_ended)
    return Span(
        samples=int(done.samples[number]),
        slow=float(done.compute_seconds[number]) > _SLOW_FROM * usual * float(done.measured[number]),
        compute_began=compute_began,
        compute_ended=compute_ended,
        wait_ended=min(compute_ended + float(done.wait_seconds[number]), ended),
        ended=ended,
    )
