"""Whether the sketches of some samples, taken on different workers, are of the same samples."""

import math
from collections.abc import Sequence
from typing import Final, final

import msgspec

NEAR: Final = 0.02
"""Of the spread of a sample's values: decoders and processors differ by less, other samples by more."""
_NEAR_VALUE: Final = 0.1
"""Of the spread, for single values."""
_ROUNDING: Final = 1e-3


@final
class Leaf(msgspec.Struct, frozen=True, kw_only=True):
    """What is compared of one tensor, number or text of a sample.

    Attributes:
        kind: What it is.
        shape: Of a tensor.
        digest: Of what must be equal to the bit, such as labels, tokens and texts.
        mean: Of what need not be.
        spread: The standard deviation.
        values: Some of its values.
    """

    kind: str
    shape: tuple[int, ...] = ()
    digest: int = 0
    mean: float = 0.0
    spread: float = 0.0
    values: tuple[float, ...] = ()


Sketch = tuple[Leaf, ...]
"""Of a few samples of a dataset; empty if nothing in them can be compared."""


def unlike(sketches: Sequence[Sketch]) -> int | None:
    """The first worker whose samples are not those of worker 0; None if no two workers can be told apart.

    A worker without a sketch is like all others.
    """
    known = [rank for rank, sketch in enumerate(sketches) if sketch]
    return next((rank for rank in known if not alike(sketches[known[0]], sketches[rank])), None)


def alike(one: Sketch, other: Sketch) -> bool:
    """Whether both may be of the same samples, decoded on different machines."""
    return len(one) == len(other) and all(map(_alike, one, other))


def _alike(one: Leaf, other: Leaf) -> bool:
    if (one.kind, one.shape, one.digest) != (other.kind, other.shape, other.digest):
        return False
    spread = max(one.spread, other.spread)
    spread = spread if math.isfinite(spread) else 0.0
    return (
        _near(one.mean, other.mean, NEAR * spread)
        and _near(one.spread, other.spread, NEAR * spread)
        and all(_near(a, b, _NEAR_VALUE * spread) for a, b in zip(one.values, other.values, strict=True))
    )


def _near(one: float, other: float, within: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return one == other or (math.isnan(one) and math.isnan(other))
    return abs(one - other) <= within + _ROUNDING * max(abs(one), abs(other))
