"""Injected slowness and emulated devices: how long a worker's compute takes, decided without a clock."""

from evenstep.core.disturb.affine import AffineCurve
from evenstep.core.disturb.base import Curve, Disturbance
from evenstep.core.disturb.chain import Chain
from evenstep.core.disturb.constant import Constant
from evenstep.core.disturb.device import Device
from evenstep.core.disturb.episodic import Episodic
from evenstep.core.disturb.jitter import Jitter
from evenstep.core.disturb.measured import MEASURED_CURVES
from evenstep.core.disturb.news import SlownessNews
from evenstep.core.disturb.per_worker import PerWorker
from evenstep.core.disturb.points import PointCurve
from evenstep.core.disturb.since import From
from evenstep.core.disturb.slowness import NO_SLOWNESS, Slowness
from evenstep.core.disturb.trace import Trace
from evenstep.core.disturb.undisturbed import Undisturbed

__all__ = [
    "MEASURED_CURVES",
    "NO_SLOWNESS",
    "AffineCurve",
    "Chain",
    "Constant",
    "Curve",
    "Device",
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
