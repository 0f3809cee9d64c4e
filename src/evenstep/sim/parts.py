"""The work of each worker in an iteration without servers, as the runtime's loader and tracker decide it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from evenstep.core.samples import CostSharing, EpochCosts, Ledger, Lookahead, Share, micro_batches
from evenstep.core.samples.lookahead import part_of
from evenstep.core.values import IntArray


@final
@dataclass(frozen=True, slots=True, eq=False)
class IterationParts:
    """One iteration of all workers.

    Attributes:
        share: The knowledge about it that all workers share; do not use the positions.
        amounts: By worker: the size of each micro-batch, including copies; in average samples if costs differ.
        loads: By worker: the load from which its speed is measured.
        largest: By worker: the memory that its largest micro-batch takes.
    """

    share: Share
    amounts: Sequence[Sequence[float]]
    loads: Sequence[float]
    largest: Sequence[float]


@final
class Parts:
    """The iterations of an epoch.

    Args:
        ledger: The epoch.
        sizes: Returns the sizes as they are decided now, int64 of shape [workers], in samples; in average samples if
            slices are divided by cost.
        sharing: Divides slices by cost; None: by count, whatever the samples cost.
        minimum: The fewest samples that a worker can compute on.
        micro_batch: The samples, or average samples, of a micro-batch; None if shares are computed whole.
        costs: The costs of the samples; None if all cost alike.
    """

    def __init__(
        self,
        ledger: Ledger,
        sizes: Callable[[], IntArray],
        sharing: CostSharing | None,
        *,
        minimum: int,
        micro_batch: int | None,
        costs: EpochCosts | None,
    ) -> None:
        self._ledger, self._sharing, self._costs = ledger, sharing, costs
        self._minimum, self._micro_batch = minimum, micro_batch
        self._lookahead = Lookahead(ledger, worker=0, sizes=sizes, depth=0, minimum=minimum, sharing=sharing)
        self.replan = self._lookahead.replan

    def take(self) -> IterationParts | None:
        """The next iteration; None when the epoch is over."""
        share, owners, cut = self._lookahead.share(), self._lookahead.owners, self._ledger.slice(self._ledger.iteration)
        if share is None or cut is None:
            return None
        self._lookahead.advance()
        if self._sharing is not None and owners is not None:
            return self._by_cost(share, owners, cut.start, self._sharing)
        batches, most = [batch_of(size, self._minimum) for size in share.sizes.tolist()], self._micro_batch
        largest = batches if most is None else [min(batch, most) for batch in batches]
        return IterationParts(share, self._amounts(cut.start, share.sizes, batches), batches, largest)

    def _amounts(self, start: int, sizes: IntArray, batches: Sequence[int]) -> list[tuple[float, ...]]:
        if self._costs is None:
            if (most := self._micro_batch) is None:
                return [(batch,) for batch in batches]
            return [tuple(min(most, batch - begin) for begin in range(0, batch, most)) for batch in batches]
        amounts, first = [], start
        for size, batch in zip(sizes.tolist(), batches, strict=True):
            positions = tuple(range(start, start + size)) or (first,)
            positions *= batch // len(positions)
            step = self._micro_batch or batch
            amounts.append(tuple(self._costs.samples(positions[at : at + step]) for at in range(0, batch, step)))
            start += size
        return amounts

    def _by_cost(self, share: Share, owners: IntArray, start: int, sharing: CostSharing) -> IterationParts:
        amounts, loads = [], []
        part, costs = sharing.per_sample.thousandths / 1000, sharing.costs
        for worker, samples in enumerate(share.sizes.tolist()):
            positions = part_of(owners, worker, start) or (start,)
            positions *= max(-(-self._minimum // len(positions)), 1)
            own: tuple[float, ...] = (costs.samples(positions),)
            if self._micro_batch is not None:
                whole = Share(iteration=share.iteration, positions=positions, samples=samples, sizes=share.sizes)
                own = tuple(costs.samples(each.positions) for each in micro_batches(whole, self._micro_batch, costs))
            amounts.append(own)
            loads.append((1.0 - part) * sum(own) + part * len(positions) if part else sum(own))
        return IterationParts(share, amounts, loads, [max(own) for own in amounts])


def batch_of(samples: int, minimum: int) -> int:
    """The batch size of a worker with this many samples, filled up with copies if below the minimum."""
    own = samples or 1
    return own if own >= minimum else own * -(-minimum // own)
