"""The positions that one worker fetches ahead and those that it needs now, while the sizes keep changing."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from evenstep.core.load.shares import shares, short_slice_sizes
from evenstep.core.samples.costs import CostSharing
from evenstep.core.samples.ledger import Ledger
from evenstep.core.samples.share import Request, Share
from evenstep.core.values import IntArray


@final
@dataclass(frozen=True, slots=True)
class PrivateParts:
    """The parts of an epoch of K iterations: x_i = floor((k + 1) n_i / K) - floor(k n_i / K) of a worker's n_i samples.

    Over the epoch they sum to n_i, and no two iterations of a worker differ by more than a sample.

    >>> [PrivateParts([7, 3], 4).sizes(k).tolist() for k in range(4)]
    [[1, 0], [2, 1], [2, 1], [2, 1]]
    """

    lengths: Sequence[int]
    iterations: int

    def sizes(self, iteration: int) -> IntArray:
        """The samples of each worker in an iteration, int64 of shape [workers]."""
        return np.diff([[self._end(each, iteration), self._end(each, iteration + 1)] for each in self.lengths])[:, 0]

    def positions(self, worker: int, iteration: int) -> range:
        """A worker's positions in its own order; without any, the last one before, whose gradient does not count."""
        length = self.lengths[worker]
        start, stop = self._end(length, iteration), self._end(length, iteration + 1)
        return range(start, stop) or range(max(start - 1, 0), max(start, 1))

    def _end(self, length: int, iteration: int) -> int:
        return iteration * length // self.iterations


@dataclass(slots=True)
class _Planned:
    """A slice in the window: its current sizes, and the positions that this worker needs and has requested.

    `owners` is its assignment if the sizes have changed, or samples differ in cost; until then workers have consecutive
    parts in their order. `unasked` are the needed positions not yet requested. `whole`: it was requested whole.
    """

    iteration: int
    cut: range
    sizes: IntArray
    needed: tuple[int, ...]
    unasked: tuple[int, ...]
    asked: tuple[int, ...]
    owners: IntArray | None = None
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
        self._sizes, self._place = sizes, self._place_in(sizes)
        self._whole = int(sizes.sum()) if self._private is None else -1

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
            sizes = self._sizes if len(cut) == self._whole else self._sizes_of(iteration, cut)
            start, stop = self._place if sizes is self._sizes else self._place_in(sizes)
            needed, asked = tuple(cut[start:stop]) or (cut.start,), self._asked.pop(iteration, ())
            self._window.append(planned := _Planned(iteration, cut, sizes, needed, needed, asked))
            if self._private is not None:
                planned.need(self._private.positions(self._worker, iteration))
            elif self._sharing is not None:
                self._assign(planned, sizes)
            elif asked:
                planned.need(needed)

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

    def redivide(self, sizes: IntArray, taken: IntArray) -> Share:
        """Give the present slice alone these sizes; returns this worker's share, which begins with what it has taken.

        `taken` is the number of positions that each worker has taken, int64 of shape [workers], at most its size.
        """
        planned, held = self._window[0], self._window[0].needed[: int(taken[self._worker])]
        planned.owners = reassign(split(planned.sizes) if planned.owners is None else planned.owners, sizes)
        planned.sizes = sizes
        given, begun = set(held), bool(planned.asked)
        mine = part_of(planned.owners, self._worker, planned.cut.start)
        planned.need((*held, *[each for each in mine if each not in given]))
        self.misses += begun * len(planned.unasked)
        share = self.share()
        assert share is not None
        return share

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
        positions = planned.needed
        if len(positions) < self._minimum:
            positions = self._filled(positions)
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
        """By iteration, the requested positions, as far as what is fetched can be divided again."""
        return self._asked | {each.iteration: each.asked for each in self._window if each.asked and not each.whole}

    @property
    def all_positions(self) -> list[tuple[int, ...]]:
        """The positions of each worker's share of the present slice, after `share`."""
        planned = self._window[0]
        owners, start = split(planned.sizes) if planned.owners is None else planned.owners, planned.cut.start
        return [self._filled(part_of(owners, worker, start) or (start,)) for worker in range(len(planned.sizes))]

    def _filled(self, positions: tuple[int, ...]) -> tuple[int, ...]:
        """The positions, repeated up to the fewest that a worker can compute on."""
        return positions * max(-(-self._minimum // len(positions)), 1)

    def advance(self) -> None:
        """Take the present slice, which has been handed out, from the ledger and move the window."""
        self._ledger.iteration += 1
        if self._unsettled:
            self._unsettled -= 1
        self._window.popleft()


# An assignment is an int64 array `owners` of shape [slice length]: the worker of each position of the slice. After a
# change of sizes, each worker keeps what it already holds.


def split(sizes: IntArray) -> IntArray:
    """The first assignment of a slice: consecutive parts in the order of the workers.

    >>> split(np.array([2, 0, 3])).tolist()
    [0, 0, 2, 2, 2]
    """
    return np.repeat(np.arange(len(sizes)), sizes)


def reassign(owners: IntArray, sizes: IntArray) -> IntArray:
    """The assignment after a change of sizes; every worker keeps the first positions of its part.

    A worker whose size shrinks gives up its last positions, and the workers whose sizes grow take those, in order. So
    only what must move moves (prefix sums would shift everybody's part when one size changes). As a pure function it
    gives the same result on every worker. `sizes` must sum to the length of the slice.

    >>> reassign(np.array([0, 0, 0, 1, 1, 2]), np.array([1, 2, 3])).tolist()
    [0, 2, 2, 1, 1, 2]
    """
    held = np.bincount(owners, minlength=len(sizes))
    by_worker = np.argsort(owners, kind="stable")
    nth_of_its_worker = np.arange(len(owners)) - np.repeat(np.cumsum(held) - held, held)
    given_up = np.sort(by_worker[nth_of_its_worker >= np.repeat(sizes, held)])
    result = owners.copy()
    result[given_up] = np.repeat(np.arange(len(sizes)), np.maximum(sizes - held, 0))
    return result


def part_of(owners: IntArray, worker: int, start: int) -> tuple[int, ...]:
    """The positions of a worker in a slice that begins at position `start`, ascending."""
    return tuple((np.flatnonzero(owners == worker) + start).tolist())


def slice_sizes(sizes: IntArray, length: int, minimum: int, *, even: bool = False) -> IntArray:
    """The sizes for a slice of `length` samples: the planned sizes, or others in their proportion.

    With `even` every worker gets a sample if there are enough. Only the lists of a user's batch sampler are ever longer
    than the planned sizes together.

    >>> slice_sizes(np.array([4, 4, 8, 16]), 9, minimum=2, even=True).tolist()
    [2, 2, 2, 3]
    >>> slice_sizes(np.array([1, 3]), 8, minimum=1).tolist()
    [2, 6]
    """
    whole, workers = int(sizes.sum()), len(sizes)
    if length == whole:
        return sizes
    if length > whole:
        return shares(length, sizes, lower=sizes, upper=np.full_like(sizes, length))
    if even and length >= workers:
        return shares(length, sizes, lower=np.minimum(sizes, min(minimum, length // workers)), upper=sizes)
    return short_slice_sizes(sizes, length, minimum)
