"""Tables [disturbances.NAME] of a cluster file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, final

from evenstep.cluster.quantity import DURATION, SHARE
from evenstep.cluster.slowness.base import Disturbance
from evenstep.cluster.slowness.constant import Constant
from evenstep.cluster.slowness.episodic import Episodic
from evenstep.cluster.slowness.jitter import Jitter
from evenstep.cluster.slowness.since import From
from evenstep.cluster.slowness.trace import Trace
from evenstep.cluster.table import Table, as_number
from evenstep.core.errors import ConfigError


def read_disturbance(table: Table, *, seed: int) -> Disturbance:
    """The disturbance that a table describes, for whichever workers name it; ConfigError for a wrong table."""
    kind = _KINDS[table.name("kind", _KINDS)]
    table.only(("kind", *kind.keys))
    return kind.read(table, seed)


def _constant(table: Table, seed: int) -> Disturbance:
    if "factor" not in table.entries and "extra" not in table.entries:
        raise ConfigError("a constant disturbance needs 'factor', 'extra' or both")
    return Constant(factor=table.number("factor", 1.0), extra_seconds=table.quantity("extra", DURATION, 0.0))


def _episodic(table: Table, seed: int) -> Disturbance:
    return Episodic(
        factor=table.number("factor"),
        period=table.integer("period", least=1),
        shortest=table.integer("shortest"),
        longest=table.integer("longest"),
        seed=seed,
    )


def _from(table: Table, seed: int) -> Disturbance:
    return From(
        factor=table.number("factor"),
        first=table.integer("first"),
        until=table.integer("until") if "until" in table.entries else None,
    )


def _jitter(table: Table, seed: int) -> Disturbance:
    return Jitter(spread=table.quantity("spread", SHARE), seed=seed)


def _trace(table: Table, seed: int) -> Disturbance:
    return Trace(factors=tuple(as_number("each of factors", item) for item in table.items("factors")))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """The keys that one kind of disturbance has beside `kind`, and how they become its member."""

    keys: tuple[str, ...]
    read: Callable[[Table, int], Disturbance]


_KINDS: Final[Mapping[str, _Kind]] = MappingProxyType(
    {
        "constant": _Kind(keys=("factor", "extra"), read=_constant),
        "episodic": _Kind(keys=("factor", "period", "shortest", "longest"), read=_episodic),
        "from": _Kind(keys=("factor", "first", "until"), read=_from),
        "jitter": _Kind(keys=("spread",), read=_jitter),
        "trace": _Kind(keys=("factors",), read=_trace),
    }
)
