"""The work of each worker in an iteration without servers, as the runtime's loader and tracker decide it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from evenstep.core.samples import CostSharing, EpochCosts, Share, micro_batches
from evenstep.core.values import IntArray


@final
@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """One iteration of all workers.

    Attributes:
        amounts: By worker: the size of each micro-batch, including copies; in average samples if costs differ.
        loads: By worker: the load from which its speed is measured.
        largest: By worker: the memory that its largest micro-batch takes.
    """

    amounts: Sequence[Sequence[float]]
    loads: Sequence[float]
    largest: Sequence[float]


def parts_by_count(sizes: IntArray, minimum: int, micro_batch: int | None) -> Parts:
    """The parts of a slice whose samples all cost alike, if no worker can compute on fewer than `minimum`."""
    batches = [batch_of(size, minimum) for size in sizes.tolist()]
    if micro_batch is None:
        return Parts([(batch,) for batch in batches], batches, batches)
    amounts = [batches_in(batch, micro_batch) for batch in batches]
    return Parts(amounts, batches, [each[0] for each in amounts])


def parts_by_position(
    share: Share,
    positions: Sequence[tuple[int, ...]],
    costs: EpochCosts,
    sharing: CostSharing | None,
    micro_batch: int | None,
) -> Parts:
    """The parts of a slice whose samples differ in cost, given the positions of each worker.

    Without `sharing`, workers do not know the costs, and cut their positions into micro-batches by count.
    """
    amounts, loads, largest = list[Sequence[float]](), list[float](), list[float]()
    for own, samples in zip(positions, share.sizes.tolist(), strict=True):
        pieces = [own]
        if micro_batch is not None and sharing is None:
            pieces = [own[at : at + micro_batch] for at in range(0, len(own), micro_batch)]
        elif micro_batch is not None:
            whole = Share(iteration=share.iteration, positions=own, samples=samples, sizes=share.sizes)
            pieces = [each.positions for each in micro_batches(whole, micro_batch, costs)]
        amounts.append([costs.samples(each) for each in pieces])
        loads.append(len(own) if sharing is None else sharing.per_sample.load(sum(amounts[-1]), len(own)))
        largest.append(len(pieces[0]) if sharing is None else max(amounts[-1]))
    return Parts(amounts, loads, largest)


def batch_of(samples: int, minimum: int) -> int:
    """The batch size of a worker with this many samples, filled up with copies if below the minimum."""
    own = samples or 1
    return own if own >= minimum else own * -(-minimum // own)


def batches_in(batch: int, micro_batch: int | None) -> Sequence[float]:
    """The sizes of the micro-batches that a batch is cut into; itself if `micro_batch` is None."""
    if micro_batch is None:
        return (batch,)
    return [min(micro_batch, batch - begin) for begin in range(0, batch, micro_batch)]
