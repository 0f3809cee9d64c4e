"""Tables [devices.NAME] of a cluster file."""

from typing import Final

from evenstep.cluster.quantity import CAPACITY, DURATION
from evenstep.cluster.slowness.affine import AffineCurve
from evenstep.cluster.slowness.base import Curve
from evenstep.cluster.slowness.device import Device
from evenstep.cluster.slowness.device_memory import DeviceMemory
from evenstep.cluster.slowness.measured import MEASURED_CURVES
from evenstep.cluster.slowness.points import FIT_FROM, PointCurve
from evenstep.cluster.table import Table, as_integer, as_quantity
from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED

_AFFINE: Final = ("per_sample", "fixed", "flat")
_MEMORY: Final = ("memory", "memory_fixed", "memory_per_sample")


def read_device(table: Table) -> Device:
    """The device that a table describes; ConfigError where it describes none, or more than one."""
    table.only((*_AFFINE, "measured", "points", "fit_from", "largest_batch", *_MEMORY))
    return Device(
        curve=_read_curve(table),
        largest_batch=table.integer("largest_batch", UNLIMITED, least=1),
        memory=_read_memory(table),
    )


def _read_memory(table: Table) -> DeviceMemory | None:
    given = [key for key in _MEMORY if key in table.entries]
    if not given:
        return None
    if "memory" not in given or "memory_per_sample" not in given:
        raise ConfigError(f"the key {given[0]!r} needs both 'memory' and 'memory_per_sample' beside it")
    return DeviceMemory(
        capacity_bytes=int(table.quantity("memory", CAPACITY)),
        fixed_bytes=int(table.quantity("memory_fixed", CAPACITY, 0.0)),
        bytes_per_sample=int(table.quantity("memory_per_sample", CAPACITY)),
    )


def _read_curve(table: Table) -> Curve:
    described = [key for key in ("per_sample", "measured", "points") if key in table.entries]
    if len(described) != 1:
        found = " and ".join(map(repr, described)) or "none of them"
        raise ConfigError(f"a device needs exactly one of 'per_sample', 'measured' and 'points', and there is {found}")
    # A key that the chosen form ignores is a mistake of the writer, not a detail.
    stray = ("fit_from",) if described == ["per_sample"] else ("fixed", "flat")
    for key in stray:
        if key in table.entries:
            raise ConfigError(f"the key {key!r} does not go with {described[0]!r}; remove one of them")
    if described == ["per_sample"]:
        return AffineCurve(
            fixed_seconds=table.quantity("fixed", DURATION, 0.0),
            seconds_per_sample=table.quantity("per_sample", DURATION),
            flat_size=table.integer("flat", 0),
        )
    fit_from = table.integer("fit_from", FIT_FROM, least=1)
    if described == ["measured"]:
        return PointCurve.measured(table.name("measured", MEASURED_CURVES), fit_from=fit_from)
    return PointCurve(points=tuple(_read_point(item) for item in table.items("points")), fit_from=fit_from)


def _read_point(item: object) -> tuple[int, float]:
    if not isinstance(item, list) or len(item) != 2:
        raise ConfigError(f'each of points must be a pair such as [16, "30.5 ms"], not {shown(item)}')
    return (
        as_integer("each batch size of points", item[0], least=1),
        as_quantity("each time of points", item[1], DURATION),
    )
