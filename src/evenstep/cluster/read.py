"""Parses texts into values: the cluster file and the launcher's `--slow`. Does not open files itself."""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import signature
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeVar, final, get_args

from evenstep.cluster.cluster import Cluster, ClusterWorker, Host, Link
from evenstep.cluster.costs import COSTS, CostDistribution
from evenstep.cluster.record import (
    CAPACITY,
    DURATION,
    FROM_ONE,
    SEED,
    Defined,
    Named,
    as_table,
    decode,
    keys_of,
    require_keys,
)
from evenstep.cluster.slowness import DeviceMemory, Disturbance
from evenstep.cluster.slowness.devices import FIT_FROM, MEASURED_CURVES, AffineCurve, Device, PointCurve, TimeCurve
from evenstep.cluster.slowness.disturbances import Constant, Episodic, From, Jitter, Taken, Taking, Trace
from evenstep.cluster.slowness.draw import derive_seed
from evenstep.cluster.spot import DrawnSpot, RecordedSpot, Spot
from evenstep.core.errors import ConfigError, naming
from evenstep.core.shown import shown

T = TypeVar("T")

_MAX_WORKERS: Final = 1_000_000  # More than any cluster; a typing error in `count` must not fill the memory.
_KINDS: Final[Mapping[str, Callable[..., Disturbance]]] = MappingProxyType(
    {"constant": Constant, "episodic": Episodic, "from": From, "jitter": Jitter, "trace": Trace}
)
_TAKEN: Final = MappingProxyType({name: name for name in get_args(Taken)})
_SLOW: Final = re.compile(r"(?P<worker>[0-9]+)=(?:(?P<factor>[0-9]+(?:\.[0-9]+)?)x)?(?:\+(?P<extra>.+))?")


def parse_cluster(text: str, *, name: str = "cluster file") -> Cluster:
    """Parse the TOML text that describes a cluster.

    docs/cluster-files.md has every key. The record of each table says by its annotations which values they take.

    Args:
        text: The contents of the file.
        name: The name of the file in error messages.

    Raises:
        ConfigError: The text is not TOML, or does not describe a cluster; one sentence with the place in the file.

    >>> cluster = parse_cluster('''
    ...     [devices.fast]
    ...     fixed = "10 ms"
    ...     per_sample = "0.5 ms"
    ...     [[workers]]
    ...     device = "fast"
    ...     count = 3
    ... ''')
    >>> cluster.disturbance().seconds(worker=2, iteration=0, batch_size=8, natural_seconds=0.0)
    0.014
    """
    with naming(name):
        try:
            table = tomllib.loads(text)
        except ValueError as error:
            raise ConfigError(f"this is not valid TOML: {error}") from None
        except RecursionError:
            raise ConfigError("this is nested too deeply for a cluster file") from None
        return _cluster(table)


def parse_slow(text: str, source: str = "--slow") -> Constant:
    """Parse a slowness such as RANK=FACTORx, RANK=+EXTRA or RANK=FACTORx+EXTRA; errors begin with its source.

    Raises:
        ConfigError: The text has none of these forms, its unit is unknown or its factor is below 1.

    >>> parse_slow("3=4x")
    Constant(worker=3, factor=4.0, extra_seconds=0.0)
    >>> parse_slow("3=4x+50ms")
    Constant(worker=3, factor=4.0, extra_seconds=0.05)
    """
    match = _SLOW.fullmatch(text)
    if match is None or not (match["factor"] or match["extra"]):
        raise ConfigError(
            f"{source} needs a rank and how much slower, such as 3=4x, 3=+50ms or 3=4x+50ms, not {shown(text)}"
        )
    with naming(f"{source} {text}"):
        extra_seconds = DURATION.read("the extra time", match["extra"]) if match["extra"] else 0.0
        return Constant(worker=int(match["worker"]), factor=float(match["factor"] or 1), extra_seconds=extra_seconds)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    seed: Annotated[int, SEED] = 0
    gradient_bytes: Annotated[int | None, "gradients", CAPACITY] = None
    costs: Annotated[CostDistribution | None, COSTS] = None


_SECTIONS: Final = (*keys_of(_File), "devices", "links", "hosts", "disturbances", "spots", "workers", "servers")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    host: Annotated[Host, Named("hosts")]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Repeated:
    count: Annotated[int, FROM_ONE] = 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    measured: Annotated[str, Named("curves")]
    fit_from: Annotated[int, FROM_ONE] = FIT_FROM


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    kind: Annotated[Callable[..., Disturbance], Named("kinds")]
    takes: Annotated[Taken | None, Named("taken")] = None


def _cluster(table: Mapping[str, object]) -> Cluster:
    file = decode(_File, table, other_keys=_SECTIONS)
    seed = file.seed
    links = _each(table, "links", lambda name, entry: decode(Link, entry, name=name))
    hosts = _each(table, "hosts", lambda name, entry: decode(Host, entry, {"links": links}, name=name))
    defined: Defined = {
        "links": links,
        "hosts": hosts,
        "devices": _each(table, "devices", lambda _, entry: _device(entry)),
        "disturbances": _each(table, "disturbances", lambda name, entry: _disturbance(entry, derive_seed(seed, name))),
        "spots": _each(table, "spots", lambda name, entry: _spot(entry, derive_seed(seed, name))),
    }
    if "workers" not in table:
        raise ConfigError("the key 'workers' is missing")
    workers = _repeated(table, "workers", ClusterWorker, defined)
    if not workers:
        raise ConfigError("workers must hold at least one table [[workers]]")
    return Cluster(
        workers=workers,
        hosts=tuple(hosts.values()),
        links=tuple(links.values()),
        servers=tuple(server.host for server in _repeated(table, "servers", _Server, defined)),
        seed=seed,
        gradient_bytes=file.gradient_bytes,
        costs=file.costs,
    )


def _each(table: Mapping[str, object], section: str, read: Callable[[str, object], T]) -> dict[str, T]:
    """The result of `read` for the name and the value of each [section.NAME]."""
    with naming(f"[{section}]"):
        entries = as_table(table.get(section, {}))
    values = {}
    for name, entry in entries.items():
        with naming(f"[{section}.{name}]"):
            values[name] = read(name, entry)
    return values


def _repeated(table: Mapping[str, object], section: str, record: Callable[..., T], defined: Defined) -> tuple[T, ...]:
    """The records of each [[section]], as many times as its `count` says."""
    entries = table.get(section, [])
    if not isinstance(entries, list):
        raise ConfigError(f"{section} must be a list in square brackets, not {shown(entries)}")
    records: list[T] = []
    for number, entry in enumerate(entries, start=1):
        with naming(f"[[{section}]] number {number}"):
            one = decode(record, entry, defined, other_keys=keys_of(_Repeated))
            count = decode(_Repeated, entry, other_keys=keys_of(record)).count
            # Checked before the list grows.
            if count > _MAX_WORKERS - len(records):
                raise ConfigError(f"count must keep the cluster within {_MAX_WORKERS} {section}, not {count}")
            records += [one] * count
    return tuple(records)


def _device(entry: object) -> Device:
    table = as_table(entry)
    curve_keys = [key for record in _CURVES.values() for key in keys_of(record)]
    require_keys(table, (*curve_keys, *keys_of(Device), *keys_of(DeviceMemory)))
    memory = _part(table, keys_of(DeviceMemory))
    return decode(
        Device,
        _part(table, keys_of(Device)),
        curve=_curve(_part(table, curve_keys)),
        memory=decode(DeviceMemory, memory) if memory else None,
    )


def _curve(table: Mapping[str, object]) -> TimeCurve:
    described = [key for key in _CURVES if key in table]
    if len(described) != 1:
        found = " and ".join(map(repr, described)) or "none of them"
        raise ConfigError(f"a device needs exactly one of 'per_sample', 'measured' and 'points', and there is {found}")
    for key in table:
        if key not in keys_of(_CURVES[described[0]]):
            raise ConfigError(f"the key {key!r} does not go with {described[0]!r}; remove one of them")
    if "measured" in table:
        measured = decode(_Measured, table, {"curves": {name: name for name in MEASURED_CURVES}})
        return PointCurve.measured(measured.measured, fit_from=measured.fit_from)
    return decode(AffineCurve, table) if "per_sample" in table else decode(PointCurve, table)


def _disturbance(entry: object, seed: int) -> Disturbance:
    table = as_table(entry)
    kind = decode(_Kind, table, {"kinds": _KINDS, "taken": _TAKEN}, other_keys=tuple(table))
    record = kind.kind
    if record is Constant:
        if len(table) == 1:
            raise ConfigError("a constant disturbance needs 'factor', 'extra' or both")
        table = {"factor": 1.0, **table}
    given: dict[str, Any] = _part({"worker": None, "seed": seed}, signature(record).parameters)
    part: Disturbance = decode(record, table, other_keys=keys_of(_Kind), **given)
    return part if kind.takes is None else Taking(part=part, takes=kind.takes)


def _spot(entry: object, seed: int) -> Spot:
    table = as_table(entry)
    require_keys(table, ("stays", "away", "recorded"))
    if "recorded" not in table:
        return decode(DrawnSpot, table, seed=seed)
    if len(table) > 1:
        raise ConfigError("the key 'recorded' does not go with 'stays' and 'away': remove it or them")
    return decode(RecordedSpot, table)


def _part(table: Mapping[str, object], keys: Iterable[str]) -> dict[str, object]:
    return {key: table[key] for key in keys if key in table}


_CURVES: Final[Mapping[str, type]] = MappingProxyType(
    {"per_sample": AffineCurve, "measured": _Measured, "points": PointCurve}
)
