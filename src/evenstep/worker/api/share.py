"""A worker's part of one iteration, as a training loop gets it."""

from dataclasses import dataclass
from typing import final

from evenstep.core.values import IntArray


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Share:
    """One worker's part of one iteration.

    Attributes:
        iteration: Its number within the epoch, the same on all workers of a `Balancer`; on a `Client` the number of
            the worker's claim.
        positions: Positions of the epoch's order to compute on, int64 of shape [rows], at least one. They are a copy of
            another worker's sample if `samples` is 0, and repeat if there are fewer samples than the smallest batch.
        indices: The same as indices of the dataset, 0 to length - 1; int64 of shape [rows].
        samples: How many of the positions count as this worker's.
        weight: Multiply the gradient of this share's mean loss by it, before the gradients of all workers are
            added up: `samples` over all workers' samples. On a `Client` it is 1, since the servers weigh. Under
            `local-sgd`, where gradients are not added up, it is 1, or 0 if `samples` is 0.
        sizes: The samples of every worker, int64 of shape [workers]; on a `Client` as last planned.
        average: Under `local-sgd`, after the step on a share that ends a period: multiply this worker's weights by it,
            before all workers' weights are added up. It is this worker's part of all samples since the last average.
            None after other shares, and under other schemes.
    """

    iteration: int
    positions: IntArray
    indices: IntArray
    samples: int
    weight: float
    sizes: IntArray
    average: float | None = None
