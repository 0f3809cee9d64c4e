"""The position of each trained parameter in messages of gradients and weights.

Workers and servers compute the same layout, so payloads contain nothing but the numbers.
"""

import hashlib
import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from math import prod
from types import MappingProxyType
from typing import Annotated, Final, Self, final

from msgspec import Meta, Struct

from evenstep.core.errors import ConfigError

DTYPE_BYTES: Final = MappingProxyType({"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8})
"""The possible dtypes of weights, and the bytes per number."""

ALIGNMENT: Final = 64
"""Bytes. The blocks of a message begin at multiples of it, and the length of a message is a multiple of it."""

MAX_BYTES: Final = 2**42
"""The most bytes of all parameters of a run."""

_MAX_PARAMETERS: Final = 1_000_000
_MAX_GROUPS: Final = 100_000
_MAX_DIMENSIONS: Final = 64
_MAX_NAME_LENGTH: Final = 1024


class ParameterSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, array_like=True):
    """A trained parameter: its shape, a name of `DTYPE_BYTES`, and its param group, counted over all optimizers."""

    name: Annotated[str, Meta(max_length=_MAX_NAME_LENGTH)]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=MAX_BYTES)], ...], Meta(max_length=_MAX_DIMENSIONS)]
    dtype: str
    group: Annotated[int, Meta(ge=0)]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"a server cannot train parameter {self.name!r}: use {', '.join(DTYPE_BYTES)}")
        # A size of 0 must not hide the product of the others.
        if prod(max(size, 1) for size in self.shape) * DTYPE_BYTES[self.dtype] > MAX_BYTES:
            raise ConfigError(f"parameter {self.name!r} is larger than a server's limit: shrink the model")

    @property
    def elements(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in a message, in bytes."""
        return self.elements * DTYPE_BYTES[self.dtype]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The parameters of one group and dtype, which are contiguous from byte `offset` of a message."""

    group: int
    dtype: str
    offset: int
    parameters: tuple[ParameterSpec, ...]
    elements: int

    @property
    def end(self) -> int:
        """The byte after the last one."""
        return self.offset + self.elements * DTYPE_BYTES[self.dtype]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """The parameters of one shard; `blocks` and `parameters` are in the order of its messages.

    `nbytes` is the length of a message, a multiple of `ALIGNMENT`.
    """

    blocks: tuple[Block, ...]
    parameters: tuple[ParameterSpec, ...]
    nbytes: int

    @classmethod
    def of(cls, parameters: Iterable[ParameterSpec]) -> Self:
        """Lay out these parameters, sorted by group and dtype, otherwise in the given order."""
        ordered = sorted(parameters, key=_kind)
        blocks: list[Block] = []
        end = 0
        for (group, dtype), members in groupby(ordered, key=_kind):
            inside = tuple(members)
            elements = sum(parameter.elements for parameter in inside)
            blocks.append(Block(group=group, dtype=dtype, offset=aligned(end), parameters=inside, elements=elements))
            end = blocks[-1].end
        return cls(blocks=tuple(blocks), parameters=tuple(ordered), nbytes=aligned(end))

    @property
    def fingerprint(self) -> str:
        """Return a hash of the parameters."""
        text = repr([(p.name, p.shape, p.dtype, p.group) for p in self.parameters])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Layout(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All trained parameters of a run; `groups` counts the param groups of all its optimizers."""

    parameters: Annotated[tuple[ParameterSpec, ...], Meta(min_length=1, max_length=_MAX_PARAMETERS)]
    groups: Annotated[int, Meta(ge=1, le=_MAX_GROUPS)]

    def __post_init__(self) -> None:
        if len({parameter.name for parameter in self.parameters}) != len(self.parameters):
            raise ConfigError("a parameter is listed twice: list each once")
        if any(parameter.group >= self.groups for parameter in self.parameters):
            raise ConfigError(f"a parameter is in a group beyond the {self.groups} of the optimizers: describe all")
        if sum(parameter.nbytes for parameter in self.parameters) > MAX_BYTES:
            raise ConfigError("the model is larger than a server's limit: shrink it")

    def shards(self, count: int) -> tuple[ShardLayout, ...]:
        """Distribute whole parameters over `count` shards, the largest first, each to the shard with the fewest bytes.

        Raises:
            ConfigError: A shard would have no parameter.
        """
        filled = sum(parameter.nbytes > 0 for parameter in self.parameters)
        if not 1 <= count <= filled:
            raise ConfigError(
                f"{filled} parameters cannot be distributed over {count} shards: use 1 to {filled} shards"
            )
        loads = [(0, shard) for shard in range(count)]
        holders: dict[str, int] = {}
        for parameter in sorted(self.parameters, key=lambda parameter: -parameter.nbytes):
            load, shard = loads[0]
            holders[parameter.name] = shard
            heapq.heapreplace(loads, (load + parameter.nbytes, shard))
        return tuple(ShardLayout.of(p for p in self.parameters if holders[p.name] == shard) for shard in range(count))


def aligned(nbytes: int) -> int:
    """Round up to a multiple of `ALIGNMENT` bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _kind(parameter: ParameterSpec) -> tuple[int, str]:
    return parameter.group, parameter.dtype
