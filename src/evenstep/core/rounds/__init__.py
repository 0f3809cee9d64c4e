"""Federated training: the work of each node, bounds on the times that nodes report, and updates without rounds."""

from evenstep.core.rounds.asynchronous import AsynchronousRounds, Counted, Step, staleness_factor
from evenstep.core.rounds.times import Believed, RoundTimes
from evenstep.core.rounds.work import MODES, Mode, RoundWork, Work

__all__ = [
    "MODES",
    "AsynchronousRounds",
    "Believed",
    "Counted",
    "Mode",
    "RoundTimes",
    "RoundWork",
    "Step",
    "Work",
    "staleness_factor",
]
