"""Injected slowness and emulated devices: the time of a worker's compute, decided without a clock."""

from evenstep.cluster.slowness.base import NO_SLOWNESS, Disturbance, Slowness, SlownessNews, factors_of
from evenstep.cluster.slowness.devices import MEASURED_CURVES, AffineCurve, Device, DeviceMemory, PointCurve
from evenstep.cluster.slowness.disturbances import (
    Chain,
    Constant,
    Episodic,
    From,
    Jitter,
    PerWorker,
    Trace,
)

__all__ = [
    "MEASURED_CURVES",
    "NO_SLOWNESS",
    "AffineCurve",
    "Chain",
    "Constant",
    "Device",
    "DeviceMemory",
    "Disturbance",
    "Episodic",
    "From",
    "Jitter",
    "PerWorker",
    "PointCurve",
    "Slowness",
    "SlownessNews",
    "Trace",
    "factors_of",
]
