"""Federated rounds: the work of each node, which of its times are believed, and updates without a barrier."""

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
