"""What one worker fetches ahead, and what it needs now, while the sizes keep changing."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np

from evenstep.core.samples.assignment import part_of, reassign, short_slice_sizes, split
from evenstep.core.samples.ledger import Ledger, Slice
from evenstep.core.values import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One worker's part of one iteration.

    `positions` are what it computes on. Where it has `samples` = 0 they are a copy of somebody else's sample, to be
    weighted 0, because a backward must still take place; where it has fewer than the minimum, its own repeat.
    `sizes` (shape [workers]) are everybody's real counts; they sum to the slice exactly. `ends_epoch`: it is the last.
    """

    iteration: int
    positions: tuple[int, ...]
    samples: int
    sizes: IntArray
    ends_epoch: bool = False


class _Planned:
    """A slice in the window: its assignment now, and what this worker has asked for already."""

    __slots__ = ("asked", "cut", "needed", "owners", "sizes")

    def __init__(self, cut: Slice) -> None:
        self.cut = cut
        self.owners: IntArray | None = None
        self.sizes: IntArray = np.zeros(0, dtype=np.int64)
        self.needed: tuple[int, ...] = ()
        self.asked: set[int] = set()

    def assign(self, sizes: IntArray, worker: int, minimum: int) -> None:
        if self.cut.length < int(sizes.sum()):
            sizes = short_slice_sizes(sizes, self.cut.length, minimum)
        self.owners = split(sizes) if self.owners is None else reassign(self.owners, sizes)
        self.sizes = sizes
        self.needed = part_of(self.owners, worker, self.cut.start) or (self.cut.start,)

    def unasked(self) -> Iterator[int]:
        return (position for position in self.needed if position not in self.asked)


@final
class Lookahead:
    """A window over the slices of an epoch: the present one and `depth` more, planned with the sizes known so far.

    The window moves alike on every worker, so all assign alike. A change of sizes applies to every slice of the
    window, the present one included; what it makes missing is asked for first, in the order in which it is needed.

    Args:
        ledger: The epoch; the window takes its slices.
        worker: Whose share this is.
        sizes: The planned sizes, shape [workers]; they sum to the ledger's global batch size.
        depth: How many slices beyond the present one may be fetched ahead. The same on all workers.
        minimum: The fewest samples that a worker can compute on.
    """

    def __init__(self, ledger: Ledger, *, worker: int, sizes: IntArray, depth: int, minimum: int = 1) -> None:
        self._ledger = ledger
        self._worker = worker
        self._sizes = sizes
        self._depth = depth
        self._minimum = minimum
        self._window: deque[_Planned] = deque()
        self.misses = 0
        """Positions that a change of sizes made this worker ask for in slices that were already asked for."""
        self._extend()

    def _extend(self) -> None:
        while len(self._window) <= self._depth and (cut := self._ledger.slice(self._next())) is not None:
            planned = _Planned(cut)
            planned.assign(self._sizes, self._worker, self._minimum)
            self._window.append(planned)

    def _next(self) -> int:
        return self._ledger.iteration + len(self._window)

    def resize(self, sizes: IntArray) -> None:
        """Plan the present slice and all later ones with these sizes."""
        if np.array_equal(sizes, self._sizes):
            return
        self._sizes = sizes
        for planned in self._window:
            planned.assign(sizes, self._worker, self._minimum)
            if planned.asked:
                self.misses += sum(1 for _ in planned.unasked())

    def request(self, limit: int) -> tuple[int, tuple[int, ...]] | None:
        """The next positions to fetch, at most `limit`, all of one iteration; None when all are asked for."""
        for planned in self._window:
            positions = tuple(position for position, _ in zip(planned.unasked(), range(limit), strict=False))
            if positions:
                planned.asked.update(positions)
                return planned.cut.iteration, positions
        return None

    def share(self) -> Share | None:
        """This worker's part of the present slice, or None when the epoch is over."""
        if not self._window:
            return None
        planned = self._window[0]
        samples = int(planned.sizes[self._worker])
        copies = -(-self._minimum // len(planned.needed))
        return Share(
            iteration=planned.cut.iteration,
            positions=planned.needed * copies if copies > 1 else planned.needed,
            samples=samples,
            sizes=planned.sizes,
            ends_epoch=planned.cut.iteration == self._ledger.iterations - 1,
        )

    def advance(self) -> None:
        """The present slice has been handed out: take it from the ledger and move the window."""
        self._ledger.take()
        self._window.popleft()
        self._extend()
