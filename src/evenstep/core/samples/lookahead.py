"""The positions that one worker fetches ahead and those that it needs now, while the sizes keep changing."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from evenstep.core.samples.assignment import part_of, reassign, slice_sizes, split
from evenstep.core.samples.costs import CostSharing
from evenstep.core.samples.ledger import Ledger
from evenstep.core.samples.private import PrivateParts
from evenstep.core.samples.share import Request, Share
from evenstep.core.values import IntArray


@dataclass(slots=True)
class _Planned:
    """A slice in the window: its current sizes, and the positions that this worker needs and has requested.

    `owners` is its assignment if the sizes have changed, or samples differ in cost; until then workers have consecutive
    parts in their order. `unasked` are the needed positions not yet requested. `whole`: it was requested whole.
    """

    iteration: int
    cut: range
    sizes: IntArray
    needed: tuple[int, ...] = ()
    unasked: tuple[int, ...] = ()
    owners: IntArray | None = None
    asked: tuple[int, ...] = ()
    whole: bool = False

    def need(self, positions: Sequence[int]) -> None:
        """From now on this worker needs these positions; without any, a copy of another worker's."""
        needed = tuple(positions) or (self.cut.start,)
        if self.whole and needed != self.needed:
            self.asked, self.whole = (), False
        asked = set(self.asked)
        self.needed, self.unasked = needed, tuple([each for each in needed if each not in asked]) if asked else needed

    def ask(self, limit: int | None) -> tuple[int, ...]:
        positions, self.unasked = self.unasked[:limit], () if limit is None else self.unasked[limit:]
        self.asked += positions
        return positions


@final
class Lookahead:
    """A window over the slices of an epoch: the present one and `depth` more, planned with the sizes known so far.

    The window moves alike on every worker, so all workers assign alike. A change of sizes applies to every slice of the
    window, including the present one. Positions that are missing as a result are requested first, in the order of need.

    Args:
        ledger: The epoch; the window takes its slices.
        worker: Rank of the worker whose share this is.
        sizes: Returns the sizes as currently decided, int64 of shape [workers]; slices of another length are divided in
            their proportion.
        depth: The number of slices beyond the present one that may be fetched ahead. The same on all workers.
        minimum: The fewest samples that a worker can compute on.
        sharing: Divides slices by cost; sizes then count average samples. None if all samples cost alike.
        private: The parts of workers with data of their own, whose sizes are fixed. None if all share the data.
        asked: By iteration, positions that this worker has requested already, for other workers' sizes.

    Attributes:
        misses: The number of positions that a change of sizes made this worker request in already requested slices.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        worker: int,
        sizes: Callable[[], IntArray],
        depth: int,
        minimum: int = 1,
        sharing: CostSharing | None = None,
        private: PrivateParts | None = None,
        asked: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        self._ledger = ledger
        self._decided = sizes
        self._worker = worker
        self._depth = depth
        self._minimum = minimum
        self._sharing = sharing
        self._private = private
        self._asked = dict(asked or {})
        self._window: deque[_Planned] = deque()
        self.misses = 0
        self._unsettled = 0
        """The number of slices to hand out before sizes count as settled."""
        self._part = 0
        """The part of a sample's time besides its cost with which the window was divided, in thousandths."""
        self._use(sizes())

    def _use(self, sizes: IntArray) -> None:
        self._sizes, self._whole, self._place = sizes, int(sizes.sum()), self._place_in(sizes)

    def _place_in(self, sizes: IntArray) -> tuple[int, int]:
        """The start and the end of this worker's part of a slice that is divided in the order of the workers."""
        stop = sum(sizes[: self._worker + 1].tolist())
        return stop - int(sizes[self._worker]), stop

    def _extend(self) -> None:
        """Plan slices when they are first needed, with the latest sizes."""
        while len(self._window) <= self._depth:
            iteration = self._ledger.iteration + len(self._window)
            cut = self._ledger.slice(iteration)
            if cut is None:
                return
            private, sizes = self._private, self._sizes_of(iteration, cut)
            self._window.append(planned := _Planned(iteration, cut, sizes, asked=self._asked.pop(iteration, ())))
            if private is not None:
                planned.need(private.positions(self._worker, iteration))
            elif self._sharing is not None:
                self._assign(planned, sizes)
            else:
                start, stop = self._place if sizes is self._sizes else self._place_in(sizes)
                planned.need(cut[start:stop])

    def _assign(self, planned: _Planned, sizes: IntArray) -> None:
        """Divide a slice anew: by cost, or by count so that every worker keeps what it can."""
        if self._sharing is None:
            owners = reassign(split(planned.sizes) if planned.owners is None else planned.owners, sizes)
        else:
            owners = self._sharing.owners(planned.cut, sizes, planned.owners)
            sizes = np.bincount(owners, minlength=len(sizes))
        planned.owners, planned.sizes = owners, sizes
        planned.need(part_of(owners, self._worker, planned.cut.start))

    def _sizes_of(self, iteration: int, cut: range) -> IntArray:
        if self._private is not None:
            return self._private.sizes(iteration)
        if len(cut) == self._whole:
            return self._sizes
        return slice_sizes(self._sizes, len(cut), self._minimum, even=self._ledger.even)

    def replan(self) -> None:
        """See `Shares.replan`; plans with the known times per sample, too."""
        if self._private is not None:
            return
        sizes = self._decided()
        part = 0 if self._sharing is None else self._sharing.per_sample.thousandths
        if part == self._part and (sizes is self._sizes or np.array_equal(sizes, self._sizes)):
            return
        self._part = part
        self._use(sizes)
        self._unsettled = 2 * (self._depth + 1)
        for planned in self._window:
            begun = bool(planned.asked)
            self._assign(planned, self._sizes_of(planned.iteration, planned.cut))
            self.misses += begun * len(planned.unasked)

    def request(self, limit: int | None, *, whole: bool = False) -> Request | None:
        """See `Shares.request`. For some slices after a size change, none is requested whole: more may follow."""
        self._extend()
        planned = next((each for each in self._window if each.unasked), None)
        if planned is None:
            return None
        repeated = len(planned.needed) < self._minimum
        planned.whole = whole and not (limit or planned.asked or repeated or self._unsettled)
        return Request(iteration=planned.iteration, positions=planned.ask(limit), whole=planned.whole)

    def share(self) -> Share | None:
        """This worker's part of the present slice, or None when the epoch is over."""
        self._extend()
        if not self._window:
            return None
        planned, sharing = self._window[0], self._sharing
        positions = planned.needed * max(-(-self._minimum // len(planned.needed)), 1)
        share = Share(
            iteration=planned.iteration,
            positions=positions,
            samples=int(planned.sizes[self._worker]),
            sizes=planned.sizes,
            ends_epoch=planned.iteration == self._ledger.iterations - 1,
        )
        if sharing is None or planned.owners is None:
            return share
        return replace(
            share,
            cost=sharing.costs.samples(positions),
            padding=sharing.costs.padding(positions),
            loads=sharing.loads(planned.cut, planned.owners, planned.sizes),
        )

    @property
    def asked(self) -> dict[int, tuple[int, ...]]:
        """By iteration, the requested positions of the window, as far as what is fetched can be divided again."""
        return {each.iteration: each.asked for each in self._window if each.asked and not each.whole}

    @property
    def owners(self) -> IntArray | None:
        """The worker of each position of the present slice, after `share`, if it is divided by cost; else None."""
        return self._window[0].owners if self._window else None

    def advance(self) -> None:
        """Take the present slice, which has been handed out, from the ledger and move the window."""
        self._ledger.skip()
        if self._unsettled:
            self._unsettled -= 1
        self._window.popleft()
