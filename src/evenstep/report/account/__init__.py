"""What a run's time went on, what its sizes gained, and the verdict on it, in running totals."""

from evenstep.report.account.account import OWN, Account, Cause, Meetings
from evenstep.report.account.comparisons import Interval
from evenstep.report.account.served import (
    EARLY,
    ServedTotals,
    ServedWorker,
    served_long_enough,
    served_slowdowns,
    served_summary_lines,
    served_verdict,
)
from evenstep.report.account.verdict import Verdict, duration, long_enough, summary_lines, verdict_of

__all__ = [
    "EARLY",
    "OWN",
    "Account",
    "Cause",
    "Interval",
    "Meetings",
    "ServedTotals",
    "ServedWorker",
    "Verdict",
    "duration",
    "long_enough",
    "served_long_enough",
    "served_slowdowns",
    "served_summary_lines",
    "served_verdict",
    "summary_lines",
    "verdict_of",
]
