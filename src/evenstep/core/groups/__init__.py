"""With whom does a worker synchronise? Forms groups and decides when to form new ones."""

from evenstep.core.groups.form import Groups, by_host
from evenstep.core.groups.grouping import ByHost, ByRank, BySpeed, GivenGroups, Grouping, Progressive, Regroup
from evenstep.core.groups.times import IterationTimes

__all__ = [
    "ByHost",
    "ByRank",
    "BySpeed",
    "GivenGroups",
    "Grouping",
    "Groups",
    "IterationTimes",
    "Progressive",
    "Regroup",
    "by_host",
]
