"""What a run's time went on, what its sizes gained, and what there is to say of it; in running totals."""

from evenstep.core.account.account import Account
from evenstep.core.account.cause import Cause
from evenstep.core.account.comparisons import Interval
from evenstep.core.account.length import duration, long_enough
from evenstep.core.account.meetings import OWN, Meetings
from evenstep.core.account.served import EARLY, ServedWorker, served_long_enough, served_slowdowns, served_verdict
from evenstep.core.account.served_totals import ServedTotals
from evenstep.core.account.summary import served_summary_lines, summary_lines
from evenstep.core.account.verdict import Verdict, verdict_of

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
