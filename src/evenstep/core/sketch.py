"""Sketches of samples, and whether those that were taken on different workers are of the same samples."""

import math
import zlib
from collections.abc import Sequence
from typing import Any, Final, final

import msgspec
import numpy as np
from numpy.typing import NDArray

NEAR: Final = 0.02
"""Of the spread of a sample's values: decoders and processors differ by less, other samples by more."""
_NEAR_VALUE: Final = 0.1
"""Of the spread, for single values."""
_ROUNDING: Final = 1e-3
MAX_ELEMENTS: Final = 2**14
"""Of an array, evenly spaced, which a sketch is made of."""
_VALUES: Final = 8


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


def leaf_of(array: NDArray[Any], shape: Sequence[int]) -> Leaf | None:
    """The leaf of an array of this shape, from all of its elements or from some; None if they cannot be compared."""
    flat, kind = array.reshape(-1), array.dtype.kind
    flat = flat[:: max(1, -(-len(flat) // MAX_ELEMENTS))]
    if kind == "c":
        flat, kind = np.stack([flat.real, flat.imag]).reshape(-1), "f"
    if kind == "f" or flat.dtype == np.uint8:
        with np.errstate(all="ignore"):
            numbers = flat.astype(np.float64)
            mean, spread = (float(numbers.mean()), float(numbers.std())) if len(numbers) else (0.0, 0.0)
        values = numbers[:: max(1, -(-len(numbers) // _VALUES))]
        return Leaf(kind=kind, shape=tuple(shape), mean=mean, spread=spread, values=tuple(values.tolist()))
    if kind in "iub":
        return Leaf(kind=kind, shape=tuple(shape), digest=zlib.crc32(np.ascontiguousarray(flat).tobytes()))
    return None


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
