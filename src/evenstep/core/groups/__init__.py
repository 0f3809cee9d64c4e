"""With whom does a worker synchronise? Forms groups, and says when there should be others."""

from evenstep.core.groups.form import Groups, by_host, by_rank, by_speed, each_by_speed, rate_of, require_partition
from evenstep.core.groups.grouping import ByHost, ByRank, BySpeed, Given, Grouping, Progressive, Reformed, behind
from evenstep.core.groups.times import IterationTimes

__all__ = [
    "ByHost",
    "ByRank",
    "BySpeed",
    "Given",
    "Grouping",
    "Groups",
    "IterationTimes",
    "Progressive",
    "Reformed",
    "behind",
    "by_host",
    "by_rank",
    "by_speed",
    "each_by_speed",
    "rate_of",
    "require_partition",
]
