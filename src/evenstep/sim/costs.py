"""Samples that differ in cost, in virtual time: what they cost, and who computes which, as a real run decides it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import numpy.typing as npt

from evenstep.cluster.costs import CostDistribution, draw_costs
from evenstep.cluster.slowness.draw import derive_seed
from evenstep.core.errors import ConfigError
from evenstep.core.samples import (
    Costs,
    CostSharing,
    EpochCosts,
    Ledger,
    Loads,
    Lookahead,
    PerSample,
    Share,
    Slice,
    part_of,
)
from evenstep.core.samples.pass_costs import PassCosts
from evenstep.core.shown import shown
from evenstep.core.values import IntArray, Reports

_MAX_DRAWN: Final = 2**16
"""Samples that a distribution gives different costs; in a longer epoch, costs are those of several samples."""

CostsOfSamples = CostDistribution | Sequence[float]
"""What samples cost: a distribution, or the cost of each sample of a dataset."""


@final
class SampleCosts:
    """The costs of the samples of a run, in an order that is drawn for each epoch.

    Args:
        given: What samples cost, in any unit.
        length: Samples in an epoch. Of a dataset of another size, each epoch has some samples, or all several times.
        seed: Draws costs and orders.

    Raises:
        ConfigError: A cost is not finite and positive, or there is none.
    """

    def __init__(self, given: CostsOfSamples, length: int, seed: int) -> None:
        if not isinstance(given, Sequence | np.ndarray):
            given = draw_costs(given, min(length, _MAX_DRAWN), derive_seed(seed, "costs"))
        self.costs: Final = Costs.of(_array(given), len(given))
        self._length = length
        self._seed = seed
        self._epoch: tuple[int, EpochCosts] | None = None

    def of_epoch(self, number: int) -> EpochCosts:
        """The costs of this epoch's samples, by position."""
        if self._epoch is None or self._epoch[0] != number:
            generator = np.random.default_rng(derive_seed(self._seed, f"order of epoch {number}"))
            samples = len(self.costs.units)
            orders = [generator.permutation(samples) for _ in range(-(-self._length // samples))]
            self._epoch = number, EpochCosts(self.costs, np.concatenate(orders)[: self._length])
        return self._epoch[1]

    def of_pass(self, number: int) -> PassCosts:
        """The same for a coordinator."""
        return PassCosts.of(self.of_epoch(number).of(np.arange(self._length)), self.costs.mean)

    def samples(self, units: int) -> float:
        """How many average samples cost as much."""
        return units * len(self.costs.units) / self.costs.whole


def _array(given: Sequence[float]) -> npt.NDArray[np.float64]:
    try:
        numbers = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        numbers = None
    if numbers is None or not numbers.size:
        raise ConfigError(f"costs must be a distribution, or one number for each sample, not {shown(given)}")
    return numbers


def amounts_by_count(
    costs: EpochCosts, cut: Slice, sizes: IntArray, *, minimum: int, micro_batch: int | None
) -> list[tuple[float, ...]]:
    """What each worker computes of a slice that is shared out by count: the cost of each of its micro-batches."""
    amounts, start = [], cut.start
    for size in sizes.tolist():
        positions = tuple(range(start, start + size)) or (cut.start,)
        positions *= max(-(-minimum // len(positions)), 1)
        step = micro_batch or len(positions)
        pieces = [positions[begin : begin + step] for begin in range(0, len(positions), step)]
        amounts.append(tuple(costs.samples(piece) for piece in pieces))
        start += size
    return amounts


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostedPart:
    """One iteration of all workers.

    Attributes:
        sizes: How many samples each has, int64 of shape [workers].
        amounts: By worker: what each of its micro-batches costs, in average samples, copies included.
        loads: By worker: what its speed is measured by, in average samples.
        known: What all workers know of all.
    """

    sizes: IntArray
    amounts: list[tuple[float, ...]]
    loads: list[float]
    known: Loads


@final
class CostShares:
    """The iterations of an epoch, shared out by cost as the tracker of a real run does.

    Args:
        ledger: The epoch.
        sizes: The planned sizes, int64 of shape [workers].
        costs: Of the epoch's samples.
        minimum: The fewest samples that a worker can compute on.
        maximum, most, weights, per_sample: As of `CostSharing`.
        micro_batch: The average samples of a micro-batch; None if shares are computed whole.
    """

    def __init__(
        self,
        ledger: Ledger,
        sizes: IntArray,
        costs: EpochCosts,
        *,
        minimum: int,
        maximum: Callable[[], IntArray],
        most: int,
        weights: Callable[[], IntArray | None],
        per_sample: PerSample,
        micro_batch: int | None,
    ) -> None:
        self._costs = costs
        self._ledger = ledger
        self._minimum = minimum
        self._per_sample = per_sample
        self._micro_batch = micro_batch
        sharing = CostSharing(
            costs=costs, minimum=minimum, maximum=maximum, most=most, weights=weights, per_sample=per_sample
        )
        self._lookahead = Lookahead(ledger, worker=0, sizes=sizes, depth=0, minimum=minimum, sharing=sharing)

    def take(self) -> CostedPart | None:
        """The next iteration; None when the epoch is over."""
        share, owners = self._lookahead.share(), self._lookahead.owners
        if share is None or owners is None or share.loads is None:
            return None
        cut = self._ledger.slice(share.iteration)
        assert cut is not None
        own = [self._own(cut, owners, worker, share) for worker in range(len(share.sizes))]
        # As when a real worker is handed its share: the next slice is planned with the present sizes.
        self._lookahead.advance()
        amounts, loads = zip(*own, strict=True)
        return CostedPart(sizes=share.sizes, amounts=list(amounts), loads=list(loads), known=share.loads)

    def _own(self, cut: Slice, owners: IntArray, worker: int, share: Share) -> tuple[tuple[float, ...], float]:
        """What one worker computes, and the load that its speed is measured by."""
        positions = part_of(owners, worker, cut.start) or (cut.start,)
        positions *= max(-(-self._minimum // len(positions)), 1)
        amounts: tuple[float, ...] = (self._costs.samples(positions),)
        if self._micro_batch is not None:
            own = Share(
                iteration=share.iteration, positions=positions, samples=int(share.sizes[worker]), sizes=share.sizes
            )
            pieces = self._costs.micro_batches(own, self._micro_batch)
            amounts = tuple(self._costs.samples(piece.positions) for piece in pieces)
        part = self._per_sample.thousandths / 1000
        return amounts, (1.0 - part) * sum(amounts) + part * len(positions) if part else sum(amounts)

    def resize(self, sizes: IntArray) -> None:
        """Plan the next iterations with these sizes, and what samples are known to take."""
        self._lookahead.resize(sizes)

    def learn(self, part: CostedPart, reports: Reports) -> None:
        """Learn what samples take beside their cost."""
        if self._micro_batch is None:
            self._per_sample.observe(part.sizes, part.known.costs, reports.compute_microseconds)
