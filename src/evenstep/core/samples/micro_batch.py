"""A worker's share of an iteration, cut into pieces of a fixed shape."""

from dataclasses import dataclass
from typing import final

from evenstep.core.samples.lookahead import Share


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What is computed on at once: `positions`, of which `samples` are this worker's own (else 0).

    `portion` is its part of the worker's share, 0 to 1; `first` and `last` say where in the iteration it stands.
    """

    positions: tuple[int, ...]
    samples: int
    portion: float
    first: bool
    last: bool


def micro_batches(share: Share, size: int | None) -> list[MicroBatch]:
    """The share in pieces of `size` positions, the last one shorter where they do not divide; None: in one piece.

    >>> import numpy as np
    >>> share = Share(iteration=0, positions=(3, 4, 5, 6, 7), samples=5, sizes=np.array([5, 7]))
    >>> [(piece.positions, piece.portion) for piece in micro_batches(share, 2)]
    [((3, 4), 0.4), ((5, 6), 0.4), ((7,), 0.2)]
    """
    whole = len(share.positions)
    step = whole if size is None else size
    return [
        MicroBatch(
            positions=share.positions[start : start + step],
            samples=min(max(share.samples - start, 0), step),
            portion=min(step, whole - start) / whole,
            first=start == 0,
            last=start + step >= whole,
        )
        for start in range(0, whole, step)
    ]
