"""What a run's time went on, what its sizes gained, and the verdict on it, in running totals."""

from evenstep.core.load.elasticity import Elasticity
from evenstep.report.account.account import OWN, Account, Cause, Meetings
from evenstep.report.account.gain import Interval
from evenstep.report.account.served import (
    EARLY,
    ServedTotals,
    ServedWorker,
    served_long_enough,
    served_slowdowns,
    served_summary_lines,
    served_verdict,
)
from evenstep.report.account.verdict import Verdict, duration, missing_iterations, summary_lines, verdict_of

__all__ = [
    "EARLY",
    "OWN",
    "Account",
    "Cause",
    "Elasticity",
    "Interval",
    "Meetings",
    "ServedTotals",
    "ServedWorker",
    "Verdict",
    "duration",
    "missing_iterations",
    "served_long_enough",
    "served_slowdowns",
    "served_summary_lines",
    "served_verdict",
    "summary_lines",
    "verdict_of",
]
