"""Costs of a dataset's samples, and the division of slices by cost."""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.samples.balanced import balanced, fitted
from evenstep.core.samples.drawn import Indices
from evenstep.core.samples.padded import balanced_padded
from evenstep.core.samples.per_sample import THOUSAND, PerSample
from evenstep.core.samples.share import Loads, Share
from evenstep.core.values import UNLIMITED, FloatArray, IntArray, Reports


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Costs:
    """The costs of all samples, int64 of shape [dataset], in a unit of which the largest is about 2^30.

    Integers, so that all workers divide slices alike. `whole` is their sum. Costs add up; if `padded`, each sample of a
    batch costs as much as its longest one.
    """

    units: IntArray
    whole: int
    padded: bool = False

    @classmethod
    def of(cls, given: FloatArray, length: int, *, padded: bool = False, power: int = 1, name: str = "sample") -> Self:
        """The user's costs for a dataset of this length, in any unit, or their squares if `power` is 2.

        Errors call a sample by this `name`.

        Raises:
            ConfigError: A cost is not finite and positive, or the number of costs is not `length`.
        """
        if given.shape != (length,):
            shape = "x".join(map(str, given.shape)) or "one number"
            raise ConfigError(f"cost has {shape} for a dataset of {length} samples: give one number for each sample")
        wrong = np.flatnonzero(~((given > 0.0) & np.isfinite(given)))
        if wrong.size:
            raise ConfigError(
                f"the cost of {name} {int(wrong[0])} is {float(given[wrong[0]])!r}: give each {name} a finite"
                " number above 0, such as its length"
            )
        # Scaling by a power of two does not round, and keeps squares from overflowing.
        scaled = np.ldexp(given, -math.frexp(float(given.max()))[1])
        scaled = scaled * scaled if power == 2 else scaled
        units = np.maximum(np.rint(np.ldexp(scaled, 30)), 1.0).astype(np.int64)
        return cls(units=units, whole=int(units.sum()), padded=padded)

    def together(self, units: IntArray) -> int:
        """The cost of a batch of samples with these costs."""
        return len(units) * int(units.max()) if self.padded else int(units.sum())

    @property
    def mean(self) -> int:
        """The cost of an average sample, rounded down; at least 1."""
        return self.whole // len(self.units)

    @property
    def checksum(self) -> str:
        """A hash that identifies the costs."""
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
        """The cost of the samples at these positions, in average samples."""
        return self.costs.together(self.of(np.array(positions))) * len(self.costs.units) / self.costs.whole

    def fitting(self, positions: IntArray, size: int) -> int:
        """The number of positions, from the first on, that together cost at most as much as `size` average samples."""
        units = self.of(positions)
        costs = np.maximum.accumulate(units) * np.arange(1, len(units) + 1) if self.costs.padded else np.cumsum(units)
        return int(np.searchsorted(costs, size * self.costs.mean, side="right"))

    def padding(self, positions: tuple[int, ...]) -> float | None:
        """The padding in a batch of these positions, in average samples; None if batches are not padded."""
        if not self.costs.padded:
            return None
        units = self.of(np.array(positions))
        return (self.costs.together(units) - int(units.sum())) * len(self.costs.units) / self.costs.whole


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostSharing:
    """Divides slices so that the workers' predicted times are equal.

    Attributes:
        costs: The costs of the epoch's samples.
        minimum: The fewest samples that a worker can compute on.
        maximum: Returns the currently known limit of each worker in average samples, int64 of shape [workers].
        most: The largest number of samples of a worker, whatever they cost.
        per_sample: The time that each sample takes besides its cost, which is divided like cost.
        weights: Returns weights to which the sizes are proportional, int64 of shape [workers]; None if there are none.
    """

    costs: EpochCosts
    minimum: int
    maximum: Callable[[], IntArray]
    weights: Callable[[], IntArray | None]
    most: int = UNLIMITED
    per_sample: PerSample = field(default_factory=PerSample)

    def owners(self, cut: range, sizes: IntArray, owners: IntArray | None = None) -> IntArray:
        """The worker of each position of a slice.

        Args:
            cut: The positions of the slice.
            sizes: The numbers of average samples with which the workers end together, int64 of shape [workers]; their
                sum is the length of the slice. A worker with 0 gets none.
            owners: The present assignment. If costs add up, as much of it as fits is kept.
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
            return balanced_padded(costs, loads, lower=lower, upper=upper, memory=memory, room=room)
        owners = balanced(costs, loads, lower=lower, upper=upper, owners=owners)
        return owners if room is None else fitted(owners, memory, room, lower=lower, upper=upper)

    def loads(self, cut: range, owners: IntArray, sizes: IntArray) -> Loads:
        """The costs of all workers' parts; 0 where samples are repeated or copies."""
        costs, units = self.costs.costs, self.costs.of(np.arange(cut.start, cut.stop))
        loads = np.zeros(len(sizes), dtype=np.int64)
        if costs.padded:
            np.maximum.at(loads, owners, units)
            loads *= np.bincount(owners, minlength=len(sizes))
        else:
            np.add.at(loads, owners, units)
        # Products of float64 are rounded alike on every processor.
        average = THOUSAND * len(costs.units) / costs.whole
        thousandths = np.rint(loads.astype(np.float64) * average).astype(np.int64)
        return Loads(costs=np.where(sizes >= self.minimum, thousandths, 0), per_sample=self.per_sample)


@final
class SampleTimes:
    """Learns the time per sample of each loader with costs, from knowledge that all workers share."""

    def __init__(self) -> None:
        self._learned: dict[Costs, PerSample] = {}
        self._shares: deque[Share | None] = deque(maxlen=2)  # A device's times come one iteration late.

    def of(self, costs: Costs) -> PerSample:
        """The `PerSample` of one loader, which learns from now on."""
        return self._learned.setdefault(costs, PerSample())

    def observe(self, share: Share | None, loads: Loads | None, lags: Sequence[int], reports: Reports) -> None:
        """Take in an iteration.

        Args:
            share: The share of this iteration; None if a report on it is not about exactly its samples.
            loads: The costs of this iteration's samples, if known.
            lags: The number of iterations by which each worker's reports come late.
            reports: The latest reports of all workers.
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
    """The work with which the workers end together, in thousandths of an average sample.

    Sizes are whole numbers, but cost can be divided more finely. If all sizes are proportional to the weights, or
    equal, up to one sample, these exact shares are used.
    """
    has, whole = sizes > 0, THOUSAND * int(sizes.sum())
    for speeds in (weights, np.ones_like(sizes)):
        if speeds is None or not (speeds := np.where(has, speeds, 0)).any():
            continue
        loads = np.array([own * whole // int(speeds.sum()) for own in speeds.tolist()])
        if (loads[has] > 0).all() and int(np.abs(loads - THOUSAND * sizes).max()) <= THOUSAND:
            return loads
    return THOUSAND * sizes
