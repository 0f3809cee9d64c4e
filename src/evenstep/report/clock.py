"""When each iteration began, in seconds since the run did, on one axis for all workers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np

from evenstep.report.iterations import FloatArray
from evenstep.report.recorded import RecordedRun, wall_offset


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """`began[worker]` has the shape [iterations]; `seconds` is the end of the last iteration.

    `zeros[worker]` is what each worker's clock showed when the run began; None where that is not known.
    """

    began: Mapping[int, FloatArray]
    seconds: float
    zeros: Mapping[int, float] | None

    def since_begin(self, at: float | None, worker: int | None = None) -> float | None:
        """A time of a worker's clock on this axis, never before its beginning; by default of the first worker's.

        The servers and the launcher are on its host, and have the same clock.
        """
        if at is None or self.zeros is None:
            return None
        # A worker that has finished no iteration is not among them.
        first = self.zeros[min(self.zeros)]
        return max(0.0, at - (first if worker is None else self.zeros.get(worker, first)))


def times_of(run: RecordedRun) -> Times:
    """The times of a run.

    Workers of several hosts have clocks of their own, which are set by the wall clock that each noted when it began.
    Where a log has no times, iterations follow each other without a gap, and begin together behind a barrier.
    """
    known = all(not np.isnan(each.began).any() for each in run.iterations.values())
    began = _by_clock(run) if known else _end_to_end(run)
    first = min(float(each[0]) for each in began.values())
    seconds = max(
        float((began[worker] + run.iterations[worker].iteration_seconds).max()) - first for worker in run.workers
    )
    zeros = {worker: first - wall_offset(run.about.get(worker, {})) for worker in run.workers} if known else None
    return Times(began={worker: each - first for worker, each in began.items()}, seconds=seconds, zeros=zeros)


def _by_clock(run: RecordedRun) -> dict[int, FloatArray]:
    return {worker: each.began + wall_offset(run.about.get(worker, {})) for worker, each in run.iterations.items()}


def _end_to_end(run: RecordedRun) -> dict[int, FloatArray]:
    if run.servers is not None:
        return {worker: _starts(each.iteration_seconds) for worker, each in run.iterations.items()}
    longest = np.zeros(max(len(each) for each in run.iterations.values()))
    for each in run.iterations.values():
        longest[: len(each)] = np.maximum(longest[: len(each)], each.iteration_seconds)
    began = _starts(longest)
    return {worker: began[: len(each)] for worker, each in run.iterations.items()}


def _starts(seconds: FloatArray) -> FloatArray:
    return np.concatenate([[0.0], np.cumsum(seconds)[:-1]])
