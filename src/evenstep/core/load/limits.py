"""The largest batch of each worker: the one rule that joins limits known beforehand with reported ones."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final, cast, final

import numpy as np

from evenstep.core.load.base import Load
from evenstep.core.load.shares import shares
from evenstep.core.values import UNLIMITED, IntArray, Problem, State

DEFAULT_MINIMUM: Final = 2
"""Many models and losses treat a batch of one sample as a special case: BatchNorm refuses it, `squeeze` drops it."""


def smallest_batch(
    load: Load, global_batch_size: int, maximum: IntArray, *, needed: int = 1, usual: int = DEFAULT_MINIMUM
) -> int:
    """The smallest batch of every worker, in samples: the scheme's, or else the usual one if all can have it.

    It is lower if the global batch has fewer samples for each worker, a worker can hold only fewer, or the user gave a
    worker a smaller size. A single worker takes its batches as they come. The model may need more (`needed`).
    """
    if load.minimum is not None:
        return load.minimum
    if len(maximum) == 1:
        return needed
    room = min(global_batch_size // len(maximum), int(maximum.min()), *(load.given_sizes or ()))
    return max(needed, 1, min(usual, room))


@final
class SizeLimits:
    """The largest size of each worker of a run, by rank, in samples.

    The latest report of a worker counts, because a limit is a size that the worker knows to be safe: it grows with the
    batches that have run. Joins and leaves of other workers change nothing. After a worker has left, the smallest size
    that it ever reported counts until it reports again: its next process is usually on the same device, knows nothing
    about that device yet, and may exist because the last limit was too large.

    Two things override reports. No limit is below the smallest size that a worker can be given (its minimum, at least
    1, rounded up to the multiple). And sizes that the user gave are kept whatever the reports say.

    Args:
        load: Says which sizes the user gave.
        problem: The problem of all workers of the run; its maxima count until a worker reports.
        known: Sizes that are never exceeded, int64 of shape [workers]; None for the problem's maxima.

    Attributes:
        most: The largest batch of any worker that the scheme allows.
        latest: What each worker reported last.
    """

    def __init__(self, load: Load, problem: Problem, known: IntArray | None = None) -> None:
        self.most: Final = UNLIMITED if load.maximum is None else load.maximum
        self._fixed: Final = load.given_sizes is not None
        self._problem: Final = problem
        least = -(-np.maximum(problem.minimum, 1) // problem.multiple) * problem.multiple
        self._least: Final[list[int]] = least.tolist()
        self._known: Final[list[int]] = (problem.maximum if known is None else known).tolist()
        self.latest: list[int] = problem.maximum.tolist()
        self._smallest = [UNLIMITED] * problem.workers

    def report(self, worker: int, largest: int) -> bool:
        """Record that a worker can hold batches of this size; return whether the limit changed."""
        if largest == self.latest[worker] or self._fixed:
            return False
        self.latest[worker] = largest
        self._smallest[worker] = min(largest, self._smallest[worker])
        return True

    def report_all(self, largest: IntArray) -> bool:
        """Like `report`, for all workers at once; int64 of shape [workers]."""
        return sum(self.report(worker, each) for worker, each in enumerate(largest.tolist())) > 0

    def leave(self, worker: int) -> None:
        """The worker has left; keep its reports."""
        self.latest[worker] = min(self.latest[worker], self._smallest[worker])

    def of(self, worker: int) -> int:
        """The largest size of this worker, in samples."""
        return max(min(self._known[worker], self.latest[worker]), self._least[worker])

    def room(self, workers: Iterable[int]) -> int:
        """The most samples that these workers may have together, in multiples."""
        multiple = self._problem.multiple
        return sum(self.of(worker) // multiple * multiple for worker in workers)

    def least(self, workers: Iterable[int]) -> int:
        """The fewest samples that these workers must have together, in multiples."""
        return sum(self._least[worker] for worker in workers)

    def shared_by(self, workers: Iterable[int], global_batch_size: int) -> Problem:
        """The problem of only these workers; its global batch is smaller if they may not have all of the given one."""
        chosen = list(workers)
        return replace(
            self._problem,
            global_batch_size=min(global_batch_size, self.room(chosen)),
            minimum=self._problem.minimum[chosen],
            maximum=self._of(chosen),
        )

    def stretched(self, problem: Problem) -> Problem:
        """The problem of all workers with the current limits, raised in proportion if the global batch needs it.

        Together the workers always have the whole global batch, but the reports may add up to less: a short iteration,
        for example, proves only a small size to fit.

        Raises:
            ConfigError: The limits known beforehand leave no room for the global batch.
        """
        multiple = problem.multiple
        maximum = self._of(range(problem.workers))
        whole = maximum // multiple * multiple
        if int(whole.sum()) < problem.global_batch_size:
            known = np.maximum(whole, self._known)
            maximum = shares(problem.global_batch_size, maximum, lower=whole, upper=known, multiple=multiple)
        return replace(problem, maximum=maximum)

    def state_dict(self) -> State:
        """The limits, for a checkpoint."""
        return {"largest": [self.of(worker) for worker in range(len(self._known))]}

    def load_state_dict(self, state: State) -> None:
        """Use the given limits where they are below the current ones, until the workers report."""
        for worker, largest in enumerate(cast("list[int]", state["largest"])):
            self.report(worker, min(largest, self.latest[worker]))

    def _of(self, workers: Iterable[int]) -> IntArray:
        return np.array([self.of(worker) for worker in workers], dtype=np.int64)
