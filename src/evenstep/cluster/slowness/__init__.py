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
from evenstep.cluster.slowness.taking import Taking, factors_of

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
    "Taking",
    "Trace",
    "Undisturbed",
    "factors_of",
]
