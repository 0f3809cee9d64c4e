"""How large the batch of each worker may be: the one rule that joins what is known beforehand with what is reported."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final, cast, final

import numpy as np

from evenstep.core.load.allocate.shares import shares
from evenstep.core.load.base import Load
from evenstep.core.load.static import Static
from evenstep.core.values import UNLIMITED, IntArray, Problem, State


@final
class SizeLimits:
    """The largest size of each worker of a run, by rank, in samples.

    The latest report of a worker counts, because a limit is a size that is safe as far as the worker knows: it grows
    with the batches that have run. Joins and leaves of other workers change nothing. After a worker has left, the
    smallest size that it ever reported counts until it reports again: its next process is on the same device as a rule,
    knows nothing of that device yet, and may be there because the last limit was too large.

    Two things stand above reports. No limit is below the least size that a worker can be given (its minimum, at least
    1, rounded up to the multiple). And the user's own sizes (`Static`) are kept whatever is reported.

    Args:
        load: The scheme's answer to *how much*.
        problem: As for all workers of the run; its maxima count until a worker reports.
        known: What sizes never exceed, int64 of shape [workers]; None for the problem's maxima.
    """

    def __init__(self, load: Load, problem: Problem, known: IntArray | None = None) -> None:
        self._fixed: Final = isinstance(load, Static)
        self._problem: Final = problem
        least = _rounded(np.maximum(problem.minimum, 1) + problem.multiple - 1, problem.multiple)
        self._least: Final[list[int]] = least.tolist()
        self._known: Final[list[int]] = (problem.maximum if known is None else known).tolist()
        self._latest: list[int] = problem.maximum.tolist()
        self._smallest = [UNLIMITED] * problem.workers

    def report(self, worker: int, largest: int) -> bool:
        """A worker can hold batches of so many samples; whether that is another limit than before."""
        if largest == self._latest[worker] or self._fixed:
            return False
        self._latest[worker] = largest
        self._smallest[worker] = min(largest, self._smallest[worker])
        return True

    def report_all(self, largest: IntArray) -> bool:
        """As `report`, for all workers at once; int64 of shape [workers]."""
        return sum(self.report(worker, each) for worker, each in enumerate(largest.tolist())) > 0

    def leave(self, worker: int) -> None:
        """The worker is gone; what it reported stays."""
        self._latest[worker] = min(self._latest[worker], self._smallest[worker])

    def of(self, worker: int) -> int:
        """The largest size of this worker, in samples."""
        return max(min(self._known[worker], self._latest[worker]), self._least[worker])

    def room(self, workers: Iterable[int]) -> int:
        """The samples that these workers may have together, in multiples."""
        multiple = self._problem.multiple
        return sum(self.of(worker) // multiple * multiple for worker in workers)

    def least(self, workers: Iterable[int]) -> int:
        """The samples that these workers must have together, in multiples."""
        return sum(self._least[worker] for worker in workers)

    def shared_by(self, workers: Iterable[int], global_batch_size: int) -> Problem:
        """The problem of these workers alone; its global batch is smaller where they may not have all of this one."""
        chosen = list(workers)
        return replace(
            self._problem,
            global_batch_size=min(global_batch_size, self.room(chosen)),
            minimum=self._problem.minimum[chosen],
            maximum=self._of(chosen),
        )

    def stretched(self, problem: Problem) -> Problem:
        """This problem of all workers with the limits of now, raised in proportion where the global batch needs it.

        All workers have the whole global batch between them, whatever they report. What was reported may well be too
        little for it: an iteration that was short, say, has shown little to fit.

        Raises:
            ConfigError: What is known beforehand leaves no room for the global batch.
        """
        multiple = problem.multiple
        maximum = self._of(range(problem.workers))
        whole = _rounded(maximum, multiple)
        if int(whole.sum()) < problem.global_batch_size:
            known = np.maximum(whole, self._known)
            maximum = shares(problem.global_batch_size, maximum, lower=whole, upper=known, multiple=multiple)
        return replace(problem, maximum=maximum)

    # A checkpoint.

    def state_dict(self) -> State:
        """What each worker may have."""
        return {"largest": [self.of(worker) for worker in range(len(self._known))]}

    def load_state_dict(self, state: State) -> None:
        """Go on with the limits of the given state where they are below those of now, until the workers report."""
        for worker, largest in enumerate(cast("list[int]", state["largest"])):
            self.report(worker, min(largest, self._latest[worker]))

    def _of(self, workers: Iterable[int]) -> IntArray:
        return np.array([self.of(worker) for worker in workers], dtype=np.int64)


def _rounded(samples: IntArray, multiple: int) -> IntArray:
    """Down to multiples."""
    return samples // multiple * multiple
