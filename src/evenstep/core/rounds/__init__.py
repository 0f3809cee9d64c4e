"""Federated training: each node's work, bounds on the times that nodes report, and updates without rounds."""

from evenstep.core.rounds.asynchronous import AsynchronousRounds, Counted, Step, staleness_factor
from evenstep.core.rounds.times import RoundTimes
from evenstep.core.rounds.work import Mode, RoundWork, Work

__all__ = [
    "AsynchronousRounds",
    "Counted",
    "Mode",
    "RoundTimes",
    "RoundWork",
    "Step",
    "Work",
    "staleness_factor",
]
