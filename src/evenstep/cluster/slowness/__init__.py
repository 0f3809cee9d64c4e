"""Injected slowness and emulated devices: how long a worker's compute takes, decided without a clock."""

from evenstep.cluster.slowness.affine import AffineCurve
from evenstep.cluster.slowness.base import Curve, Disturbance
from evenstep.cluster.slowness.chain import Chain
from evenstep.cluster.slowness.constant import Constant
from evenstep.cluster.slowness.device import Device
from evenstep.cluster.slowness.episodic import Episodic
from evenstep.cluster.slowness.jitter import Jitter
from evenstep.cluster.slowness.measured import MEASURED_CURVES
from evenstep.cluster.slowness.news import SlownessNews
from evenstep.cluster.slowness.per_worker import PerWorker
from evenstep.cluster.slowness.points import PointCurve
from evenstep.cluster.slowness.since import From
from evenstep.cluster.slowness.slowness import NO_SLOWNESS, Slowness
from evenstep.cluster.slowness.trace import Trace
from evenstep.cluster.slowness.undisturbed import Undisturbed

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
