"""Injected slowness and emulated devices: how long a worker's compute takes, decided without a clock."""

from evenstep.cluster.slowness.base import NO_SLOWNESS, Disturbance, Slowness, SlownessNews
from evenstep.cluster.slowness.devices import MEASURED_CURVES, AffineCurve, Curve, Device, DeviceMemory, PointCurve
from evenstep.cluster.slowness.disturbances import (
    Chain,
    Constant,
    Episodic,
    From,
    Jitter,
    PerWorker,
    Trace,
    Undisturbed,
)

__all__ = [
    "MEASURED_CURVES",
    "NO_SLOWNESS",
    "AffineCurve",
    "Chain",
    "Constant",
    "Curve",
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
    "Undisturbed",
]
