"""What one worker fetches ahead, and what it needs now, while the sizes keep changing."""

from collections import deque
from dataclasses import dataclass
from typing import Self, final

import numpy as np

from evenstep.core.samples.assignment import part_of, reassign, slice_sizes, split
from evenstep.core.samples.costs import CostSharing
from evenstep.core.samples.ledger import Ledger, Slice
from evenstep.core.samples.share import Request, Share
from evenstep.core.values import IntArray


@dataclass(slots=True)
class _Planned:
    """A slice in the window: its sizes now, and what this worker has already asked for.

    `owners` is its assignment if the sizes have changed, or samples differ in cost; until then workers have consecutive
    parts in their order. `sizes` are always what the assignment gives. `unasked` is what is needed and not asked for.
    `whole`: it was asked for whole.
    """

    cut: Slice
    sizes: IntArray
    needed: tuple[int, ...]
    unasked: tuple[int, ...]
    owners: IntArray | None = None
    asked: tuple[int, ...] = ()
    whole: bool = False

    @classmethod
    def of(cls, cut: Slice, sizes: IntArray, place: tuple[int, int]) -> Self:
        """`place` is where this worker's part begins in the slice, and where it ends."""
        start, stop = place
        needed = tuple(range(cut.start + start, cut.start + stop)) or (cut.start,)
        return cls(cut, sizes, needed, needed)

    def assign(self, sizes: IntArray, worker: int) -> None:
        self._use(reassign(split(self.sizes) if self.owners is None else self.owners, sizes), sizes, worker)

    def share_out(self, sharing: CostSharing, sizes: IntArray, worker: int) -> None:
        owners = sharing.owners(self.cut, sizes, self.owners)
        self._use(owners, np.bincount(owners, minlength=len(sizes)), worker)

    def _use(self, owners: IntArray, sizes: IntArray, worker: int) -> None:
        self.owners, self.sizes = owners, sizes
        needed = part_of(owners, worker, self.cut.start) or (self.cut.start,)
        if self.whole and needed != self.needed:
            self.asked, self.whole = (), False
        asked = set(self.asked)
        self.needed, self.unasked = needed, tuple([position for position in needed if position not in asked])

    def ask(self, limit: int | None) -> tuple[int, ...]:
        positions, self.unasked = self.unasked[:limit], () if limit is None else self.unasked[limit:]
        self.asked += positions
        return positions


@final
class Lookahead:
    """A window over the slices of an epoch: the present one and `depth` more, planned with the sizes known so far.

    The window moves alike on every worker, so all workers assign alike. A change of sizes applies to every slice of the
    window, the present one included; what it makes missing is asked for first, in the order in which it is needed.

    Args:
        ledger: The epoch; the window takes its slices.
        worker: Rank of the worker whose share this is.
        sizes: The planned sizes, int64 of shape [workers]; other slices are shared out in their proportion.
        depth: How many slices beyond the present one may be fetched ahead. The same on all workers.
        minimum: The fewest samples that a worker can compute on.
        sharing: Shares slices out by cost; sizes then count average samples. None if all samples cost alike.

    Attributes:
        misses: Positions that a change of sizes made this worker ask for in slices that were already asked for.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        worker: int,
        sizes: IntArray,
        depth: int,
        minimum: int = 1,
        sharing: CostSharing | None = None,
    ) -> None:
        self._ledger = ledger
        self._worker = worker
        self._depth = depth
        self._minimum = minimum
        self._sharing = sharing
        self._window: deque[_Planned] = deque()
        self.misses = 0
        self._unsettled = 0
        """Slices to hand out before sizes count as settled."""
        self._part = 0
        """The part of a sample's time beside its cost that the window was shared out with, in thousandths."""
        self._use(sizes)
        self._extend()

    def _use(self, sizes: IntArray) -> None:
        self._sizes, self._whole, self._place = sizes, int(sizes.sum()), self._place_in(sizes)

    def _place_in(self, sizes: IntArray) -> tuple[int, int]:
        stop = sum(sizes[: self._worker + 1].tolist())
        return stop - int(sizes[self._worker]), stop

    def _extend(self) -> None:
        while len(self._window) <= self._depth:
            cut = self._ledger.slice(self._ledger.iteration + len(self._window))
            if cut is None:
                return
            sizes = self._sizes_of(cut)
            place = self._place if sizes is self._sizes else self._place_in(sizes)
            planned = _Planned.of(cut, sizes, place)
            if self._sharing is not None:
                planned.share_out(self._sharing, sizes, self._worker)
            self._window.append(planned)

    def _sizes_of(self, cut: Slice) -> IntArray:
        if cut.stop - cut.start == self._whole:
            return self._sizes
        return slice_sizes(self._sizes, cut.length, self._minimum, even=self._ledger.even)

    def resize(self, sizes: IntArray) -> None:
        """Plan the present slice and all later ones with these sizes, and what samples are known to take."""
        part = 0 if self._sharing is None else self._sharing.per_sample.thousandths
        if part == self._part and (sizes is self._sizes or np.array_equal(sizes, self._sizes)):
            return
        self._part = part
        self._use(sizes)
        self._unsettled = 2 * (self._depth + 1)
        for planned in self._window:
            begun, sizes_now = bool(planned.asked), self._sizes_of(planned.cut)
            if self._sharing is None:
                planned.assign(sizes_now, self._worker)
            else:
                planned.share_out(self._sharing, sizes_now, self._worker)
            self.misses += begun * len(planned.unasked)

    def request(self, limit: int | None, *, whole: bool = False) -> Request | None:
        """As `Shares.request`. Nothing is asked for whole for a while after a change of sizes, as more may follow."""
        planned = next((each for each in self._window if each.unasked), None)
        if planned is None:
            return None
        repeated = len(planned.needed) < self._minimum
        planned.whole = whole and not (limit or planned.asked or repeated or self._unsettled)
        return Request(iteration=planned.cut.iteration, positions=planned.ask(limit), whole=planned.whole)

    def share(self) -> Share | None:
        """This worker's part of the present slice, or None when the epoch is over."""
        if not self._window:
            return None
        planned = self._window[0]
        positions = planned.needed * max(-(-self._minimum // len(planned.needed)), 1)
        sharing, owners = self._sharing, planned.owners
        return Share(
            iteration=planned.cut.iteration,
            positions=positions,
            samples=int(planned.sizes[self._worker]),
            sizes=planned.sizes,
            ends_epoch=planned.cut.iteration == self._ledger.iterations - 1,
            cost=None if sharing is None else sharing.costs.samples(positions),
            padding=None if sharing is None else sharing.costs.padding(positions),
            loads=None if sharing is None or owners is None else sharing.loads(planned.cut, owners, planned.sizes),
        )

    @property
    def owners(self) -> IntArray | None:
        """The worker of each position of the present slice, if it is shared out by cost; None after the epoch."""
        return self._window[0].owners if self._window else None

    def advance(self) -> None:
        """The present slice has been handed out: take it from the ledger and move the window."""
        self._ledger.skip()
        if self._unsettled:
            self._unsettled -= 1
        self._window.popleft()
        self._extend()
