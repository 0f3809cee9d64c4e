"""What the samples of a dataset cost, and slices that are shared out by it."""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Self, final

import numpy as np
import numpy.typing as npt

from evenstep.core.errors import ConfigError
from evenstep.core.samples.balanced import balanced, fitted
from evenstep.core.samples.drawn import Indices
from evenstep.core.samples.ledger import Slice
from evenstep.core.samples.per_sample import THOUSAND, PerSample
from evenstep.core.samples.share import Loads, MicroBatch, Share, whole_batch
from evenstep.core.values import UNLIMITED, IntArray, Reports

_BITS: Final = 30
_LATEST: Final = 2
"""Iterations to remember: a device's times come one iteration late."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Costs:
    """The costs of all samples, int64 of shape [dataset], in a unit of which the largest is about 2^30.

    Integers, so that all workers share out alike. `whole` is their sum. Costs add up; those of `padded` samples are of
    the length of the longest one in a batch.
    """

    units: IntArray
    whole: int
    padded: bool = False

    @classmethod
    def of(cls, given: npt.NDArray[np.float64], length: int, *, padded: bool = False, power: int = 1) -> Self:
        """The costs of a dataset of this length, as the user gave them, in any unit, or their squares if `power` is 2.

        Raises:
            ConfigError: A cost is not finite and positive, or there are not as many as samples.
        """
        if given.shape != (length,):
            shape = "x".join(map(str, given.shape)) or "one number"
            raise ConfigError(f"cost has {shape} for a dataset of {length} samples: give one number for each sample")
        wrong = np.flatnonzero(~((given > 0.0) & np.isfinite(given)))
        if wrong.size:
            raise ConfigError(
                f"the cost of sample {int(wrong[0])} is {float(given[wrong[0]])!r}: give each sample a finite number"
                " above 0, such as its length"
            )
        # Scaled by a power of two, which rounds nothing, so that squares do not overflow.
        scaled = np.ldexp(given, -math.frexp(float(given.max()))[1])
        scaled = scaled * scaled if power == 2 else scaled
        units = np.maximum(np.rint(np.ldexp(scaled, _BITS)), 1.0).astype(np.int64)
        return cls(units=units, whole=int(units.sum()), padded=padded)

    def together(self, units: IntArray) -> int:
        """What a batch of samples of these costs costs."""
        return len(units) * int(units.max()) if self.padded else int(units.sum())

    @property
    def mean(self) -> int:
        """The cost of an average sample, rounded down; at least 1."""
        return self.whole // len(self.units)

    @property
    def checksum(self) -> str:
        """A hash: the same for the same costs only."""
        return hashlib.blake2b(self.units.tobytes(), digest_size=6, salt=bytes([self.padded])).hexdigest()


@final
@dataclass(frozen=True, slots=True, eq=False)
class EpochCosts:
    """The costs of an epoch's samples, by position."""

    costs: Costs
    indices: Indices

    def of(self, positions: IntArray) -> IntArray:
        """The costs at these positions, int64 of the same shape."""
        return self.costs.units[self.indices[positions]]

    def samples(self, positions: tuple[int, ...]) -> float:
        """How many average samples cost as much as those at these positions."""
        return self.costs.together(self.of(np.array(positions))) * len(self.costs.units) / self.costs.whole

    def fitting(self, positions: IntArray, size: int) -> int:
        """How many of these positions, from the first on, cost together at most as much as `size` average samples."""
        units = self.of(positions)
        costs = np.maximum.accumulate(units) * np.arange(1, len(units) + 1) if self.costs.padded else np.cumsum(units)
        return int(np.searchsorted(costs, size * self.costs.mean, side="right"))

    def padding(self, positions: tuple[int, ...]) -> float | None:
        """How many average samples' cost of a batch at these positions is padding; None if none is padded."""
        if not self.costs.padded:
            return None
        units = self.of(np.array(positions))
        return (self.costs.together(units) - int(units.sum())) * len(self.costs.units) / self.costs.whole

    def micro_batches(self, share: Share, size: int) -> list[MicroBatch]:
        """The share in pieces that cost at most as much as `size` average samples, as equal as that allows.

        A sample that costs more stands in a piece that costs little more. No piece has one sample, which many models
        cannot compute on, if there are two for each. Padded pieces are of samples of like length.
        """
        positions = np.array(share.positions)
        units, most = self.of(positions), size * self.costs.mean
        if share.samples < len(positions) or self.costs.together(units) <= most:
            return [whole_batch(share)]
        cut = _padded_pieces(units, most) if self.costs.padded else _pieces(units, most)
        chosen = [tuple(positions[each].tolist()) for each in cut]
        return [
            MicroBatch(
                positions=each,
                samples=len(each),
                portion=len(each) / len(positions),
                first=number == 0,
                last=number == len(chosen) - 1,
                cost=self.samples(each),
                padding=self.padding(each),
            )
            for number, each in enumerate(chosen)
        ]

    def of_workers(self, cut: Slice, owners: IntArray, workers: int) -> IntArray:
        """What each worker's part of a slice costs, in thousandths of an average sample, int64 of shape [workers]."""
        units, loads = self.of(np.arange(cut.start, cut.stop)), np.zeros(workers, dtype=np.int64)
        if self.costs.padded:
            np.maximum.at(loads, owners, units)
            loads *= np.bincount(owners, minlength=workers)
        else:
            np.add.at(loads, owners, units)
        # Products of float64 are rounded alike on every processor.
        average = THOUSAND * len(self.costs.units) / self.costs.whole
        return np.rint(loads.astype(np.float64) * average).astype(np.int64)


def _pieces(units: IntArray, most: int) -> list[IntArray]:
    """Where the samples of each piece stand; in as few pieces as `balanced` finds."""
    length = len(units)
    count = min(-(-int(units.sum()) // most), length)
    # Beside the costliest sample stands another one.
    most = max(most, int(units.max()) + int(units.min()))
    while True:
        few = np.full(count, min(2, length // count))
        owners = balanced(units, np.ones_like(few), lower=few, upper=np.full_like(few, length))
        if count == length or np.bincount(owners, weights=units).max() <= most:
            return [np.flatnonzero(owners == piece) for piece in range(count)]
        count += 1


def _padded_pieces(units: IntArray, most: int) -> list[IntArray]:
    """The same of samples that are padded: neighbours in the order of their lengths, the longest first."""
    longest_first = np.argsort(-units, kind="stable")
    pieces, begin = [], 0
    while begin < len(units):
        left = len(units) - begin
        count = min(max(most // int(units[longest_first[begin]]), 2), left)
        count = left if left - count == 1 else count
        pieces.append(np.sort(longest_first[begin : begin + count]))
        begin += count
    return pieces


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostSharing:
    """Shares slices out so that the workers' predicted times are equal.

    Attributes:
        costs: The costs of the epoch's samples.
        minimum: The fewest samples that a worker can compute on.
        maximum: Returns how many average samples each worker can hold, as known now, int64 of shape [workers].
        most: The most samples that a worker may have, whatever they cost.
        per_sample: The time that each sample takes beside its cost, which is shared out like cost.
        weights: Returns what the sizes are in proportion to, int64 of shape [workers]; None if to nothing.
    """

    costs: EpochCosts
    minimum: int
    maximum: Callable[[], IntArray]
    weights: Callable[[], IntArray | None]
    most: int = UNLIMITED
    per_sample: PerSample = field(default_factory=PerSample)

    def owners(self, cut: Slice, sizes: IntArray, owners: IntArray | None = None) -> IntArray:
        """The worker of each position of a slice.

        Args:
            cut: The slice.
            sizes: With how many average samples the workers end together, int64 of shape [workers]; their sum is the
                length of the slice. A worker with 0 gets none.
            owners: The present assignment, of which as much as fits is kept, if costs add up.
        """
        mean, part = self.costs.costs.mean, self.per_sample.thousandths
        memory = self.costs.of(np.arange(cut.start, cut.stop))
        costs = memory if not part else (memory * (THOUSAND - part) + mean * part) // THOUSAND + 1
        loads = _loads(sizes, self.weights()) * mean // THOUSAND
        lower = np.minimum(sizes, self.minimum)
        upper = np.where(sizes > 0, np.maximum(self.most, sizes), 0)
        holds = np.maximum(self.maximum(), sizes)
        room = None if holds.min() >= UNLIMITED else holds * mean
        if self.costs.costs.padded:
            from evenstep.core.samples.padded import balanced_padded  # Few runs need it.

            return balanced_padded(costs, loads, lower=lower, upper=upper, memory=memory, room=room)
        owners = balanced(costs, loads, lower=lower, upper=upper, owners=owners)
        return owners if room is None else fitted(owners, memory, room, lower=lower, upper=upper)

    def loads(self, cut: Slice, owners: IntArray, sizes: IntArray) -> Loads:
        """What the parts of all workers cost; 0 where samples are repeated, or copies."""
        costs = self.costs.of_workers(cut, owners, len(sizes))
        return Loads(costs=np.where(sizes >= self.minimum, costs, 0), per_sample=self.per_sample)


@final
class SampleTimes:
    """What is learned of the samples of each loader that has costs, from what all workers know of all."""

    def __init__(self) -> None:
        self._learned: dict[Costs, PerSample] = {}
        self._shares: deque[Share | None] = deque(maxlen=_LATEST)

    def of(self, costs: Costs) -> PerSample:
        """That of one loader, which learns from now on."""
        return self._learned.setdefault(costs, PerSample())

    def observe(self, share: Share | None, loads: Loads | None, lags: Sequence[int], reports: Reports) -> None:
        """Take in an iteration.

        Args:
            share: The one of this iteration; None if a report on it is not about all of its samples alone.
            loads: What the samples of this iteration cost, if that is known.
            lags: By how many iterations the reports of each worker come late.
            reports: The latest of all workers.
        """
        if not self._learned:
            return
        self._shares.appendleft(share)
        if loads is None:
            return
        known = np.zeros((2, len(lags)), dtype=np.int64)
        for lag, past in enumerate(self._shares):
            if past is not None and past.loads is not None and past.loads.per_sample is loads.per_sample:
                of_lag = np.equal(lags, lag)
                known[:, of_lag] = past.sizes[of_lag], past.loads.costs[of_lag]
        loads.per_sample.observe(known[0], known[1], reports.compute_microseconds)


def _loads(sizes: IntArray, weights: IntArray | None) -> IntArray:
    """With how much work the workers end together, in thousandths of an average sample.

    Sizes are whole numbers, and cost can be shared out more finely. Where all are what the weights give, or equal, up
    to one sample, these exact shares are used.
    """
    has, whole = sizes > 0, THOUSAND * int(sizes.sum())
    for speeds in (weights, np.ones_like(sizes)):
        if speeds is None or not (speeds := np.where(has, speeds, 0)).any():
            continue
        loads = np.array([own * whole // int(speeds.sum()) for own in speeds.tolist()])
        if (loads[has] > 0).all() and int(np.abs(loads - THOUSAND * sizes).max()) <= THOUSAND:
            return loads
    return THOUSAND * sizes
