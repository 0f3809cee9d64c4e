"""Where each trained parameter lies in the messages between workers and shards: gradients one way, weights the other.

Worker and server hold the same layout, so a message is bytes and nothing else. This knows of no socket and no process.
"""

import hashlib
import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from types import MappingProxyType
from typing import Final, Self, cast, final

from evenstep.core.errors import ConfigError

DTYPE_BYTES: Final = MappingProxyType({"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8})
"""The types that weights may have, by name, and how many bytes one number of each takes."""

ALIGNMENT: Final = 64
"""Bytes: blocks begin at, and messages are as long as, multiples of it."""

_MAX_PARAMETERS: Final = 1_000_000
_MAX_GROUPS: Final = 100_000
_MAX_DIMENSIONS: Final = 64
_LONGEST_NAME: Final = 1024
_MAX_BYTES: Final = 2**42


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """A trained parameter: its shape, a name of `DTYPE_BYTES`, and its param group, counted over all optimizers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Its size in a message."""
        return self.elements * DTYPE_BYTES[self.dtype]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The parameters of one group and dtype, one after another, from byte `offset` of a message on."""

    group: int
    dtype: str
    offset: int
    parameters: tuple[ParameterSpec, ...]
    elements: int

    @property
    def end(self) -> int:
        """The byte behind its last."""
        return self.offset + self.elements * DTYPE_BYTES[self.dtype]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """A shard's part of the parameters and what its messages look like.

    Attributes:
        blocks: In the order of the message.
        parameters: In the order of the message.
        nbytes: The length of a message, a multiple of `ALIGNMENT`.
    """

    blocks: tuple[Block, ...]
    parameters: tuple[ParameterSpec, ...]
    nbytes: int

    @classmethod
    def of(cls, parameters: Iterable[ParameterSpec]) -> Self:
        """Sorted by group and dtype, otherwise in the given order."""
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
        """Alike for shards of alike parameters, and practically for no others."""
        return _fingerprint(self.parameters)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All trained parameters of a run; `groups` is how many param groups the optimizers have together."""

    parameters: tuple[ParameterSpec, ...]
    groups: int
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fingerprint", _fingerprint(self.parameters, self.groups))

    def to_record(self) -> dict[str, object]:
        """Plain values for the wire and for snapshots."""
        return {
            "groups": self.groups,
            "parameters": [[p.name, list(p.shape), p.dtype, p.group] for p in self.parameters],
        }

    @classmethod
    def from_record(cls, record: object, *, most_bytes: int = _MAX_BYTES) -> Self:
        """What `to_record` gave, from a peer that may send anything; nothing is allocated for it.

        Raises:
            ConfigError: It is no layout, or one of more than `most_bytes` in all.
        """
        fields = cast("Mapping[object, object]", record) if isinstance(record, Mapping) else {}
        groups = _whole(fields.get("groups"), "number of groups", most=_MAX_GROUPS)
        rows = fields.get("parameters")
        if not isinstance(rows, Sequence) or not 0 < len(rows) <= _MAX_PARAMETERS:
            raise ConfigError(f"a layout lists 1 to {_MAX_PARAMETERS} parameters: send one that does")
        parameters: list[ParameterSpec] = []
        names: set[str] = set()
        left = most_bytes
        for row in rows:
            parameter = _received(row, groups, left)
            if parameter.name in names:
                raise ConfigError(f"parameter {parameter.name!r} is listed twice: list it once")
            names.add(parameter.name)
            left -= parameter.nbytes
            parameters.append(parameter)
        return cls(parameters=tuple(parameters), groups=groups)

    def shards(self, count: int) -> tuple[ShardLayout, ...]:
        """Whole parameters dealt out to so many shards, the largest first, each to the shard with the fewest bytes.

        Raises:
            ConfigError: A shard would have nothing to do.
        """
        filled = sum(parameter.nbytes > 0 for parameter in self.parameters)
        if not 1 <= count <= filled:
            raise ConfigError(f"{filled} parameters cannot be dealt out to {count} shards: use 1 to {filled} shards")
        loads = [(0, shard) for shard in range(count)]
        holders: dict[str, int] = {}
        for parameter in sorted(self.parameters, key=lambda parameter: -parameter.nbytes):
            load, shard = loads[0]
            holders[parameter.name] = shard
            heapq.heapreplace(loads, (load + parameter.nbytes, shard))
        return tuple(ShardLayout.of(p for p in self.parameters if holders[p.name] == shard) for shard in range(count))


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT` bytes."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _kind(parameter: ParameterSpec) -> tuple[int, str]:
    return parameter.group, parameter.dtype


def _fingerprint(parameters: Sequence[ParameterSpec], groups: int = 0) -> str:
    text = repr((groups, [(p.name, p.shape, p.dtype, p.group) for p in parameters]))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _received(row: object, groups: int, most_bytes: int) -> ParameterSpec:
    if not isinstance(row, Sequence) or isinstance(row, str | bytes) or len(row) != 4:
        raise ConfigError("a layout lists name, shape, dtype and group of each parameter: send these four")
    name, shape, dtype, group = row
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        raise ConfigError(f"a parameter's name is a string of at most {_LONGEST_NAME} characters: shorten it")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise ConfigError(f"parameter {name!r} is of no dtype that a server can train: use {', '.join(DTYPE_BYTES)}")
    if not isinstance(shape, Sequence) or isinstance(shape, str | bytes) or len(shape) > _MAX_DIMENSIONS:
        raise ConfigError(f"the shape of parameter {name!r} is no list of at most {_MAX_DIMENSIONS} sizes: mend it")
    sizes = tuple(_whole(size, f"size of parameter {name!r}", most=most_bytes) for size in shape)
    # A size of 0 must not hide what the other sizes multiply to.
    if prod(max(size, 1) for size in sizes) * DTYPE_BYTES[dtype] > most_bytes:
        raise ConfigError(
            f"parameter {name!r} takes the model beyond the server's limit: raise it, or shrink the model"
        )
    number = _whole(group, f"group of parameter {name!r}", most=groups - 1)
    return ParameterSpec(name=name, shape=sizes, dtype=dtype, group=number)


def _whole(value: object, what: str, *, most: int) -> int:
    """The value, where it is a whole number from 0 to the most; bool, which Python takes for one, is none."""
    if type(value) is not int or not 0 <= value <= most:
        shown = value if isinstance(value, int | float) and abs(value) < 2**64 else type(value).__name__
        raise ConfigError(f"a layout cannot have {shown!r} as the {what}: use a whole number from 0 to {most}")
    return value
