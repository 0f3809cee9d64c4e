"""The part of a scheme that answers *with whom*: which groups are formed, and when new ones are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

from evenstep.core.errors import ConfigError
from evenstep.core.groups.form import Groups, by_rank, each_by_speed, rate_of, require_partition


@final
class Regroup(NamedTuple):
    """New groups, each of which takes every iteration together from now on; `reason` is one sentence."""

    groups: Groups
    reason: str


class Grouping(Protocol):
    """Forms groups. Pure: everything known about the workers comes as arguments."""

    def form(self, workers: int) -> Groups:
        """The groups of the ranks 0 to `workers` - 1 before their speeds are known.

        Raises:
            ConfigError: This many workers cannot be grouped like this.
        """

    def reform(self, groups: Groups, seconds: Sequence[float]) -> Regroup | None:
        """Other groups if they are worth it, given the current iteration time of each worker, by rank."""
        return None


@final
@dataclass(frozen=True, slots=True)
class GivenGroups(Grouping):
    """Fixed groups, given by the user."""

    groups: Groups

    def form(self, workers: int) -> Groups:
        require_partition(self.groups, workers)
        return self.groups


@final
@dataclass(frozen=True, slots=True)
class ByHost(Grouping):
    """One group per host, so that heavy traffic stays off the network; becomes `GivenGroups` once hosts are known."""

    def form(self, workers: int) -> Groups:
        raise ConfigError(f"the hosts of the {workers} workers are not known: give their groups, such as 0-3/4-7")


@final
@dataclass(frozen=True, slots=True)
class ByRank(Grouping):
    """A fixed number of groups of neighbours by rank."""

    count: int

    def __post_init__(self) -> None:
        _require_count(self.count)

    def form(self, workers: int) -> Groups:
        return by_rank(range(workers), self.count)


@final
@dataclass(frozen=True, slots=True)
class BySpeed(Grouping):
    """At most `count` groups of workers of similar speed, formed anew when speeds have changed.

    Args:
        count: largest number of groups; 1 or more.
        worth: fraction of the present work that other groups must add, since forming them costs one barrier.
    """

    count: int
    worth: float = 0.1

    def __post_init__(self) -> None:
        _require_count(self.count)

    def form(self, workers: int) -> Groups:
        return by_rank(range(workers), self.count)

    def reform(self, groups: Groups, seconds: Sequence[float]) -> Regroup | None:
        best = each_by_speed(seconds, self.count)[-1]
        gain = rate_of(best, seconds) / rate_of(groups, seconds)
        return Regroup(best, f"of similar speed {_told(best, gain)}") if gain > 1 + self.worth else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Progressive(Grouping):
    """The fewest groups that stragglers allow: one while no worker is slow, more while each further one is worth it.

    Basu et al. (HiPC 2018) raise the number of groups as a delay grows, up to what accuracy allows, and do not say how.
    We add a group of similar speed while that raises the predicted work by the fraction `worth`, and no group is
    predicted to fall behind by more than `behind` global batches in one of its iterations. We remove one as soon as it
    adds less than half of that, or a group falls behind by the fraction `slack` more than that.

    Args:
        worth: fraction of the present work that a further group must add; more than 0.
        behind: global batches that all others may do in one iteration of any group; more than 0.
        most: largest number of groups; 1 or more.
        slack: fraction by which formed groups may exceed `behind`; without it, noise would form and dissolve them.
    """

    worth: float = 0.1
    behind: float = 10.0
    most: int = 8
    slack: float = 0.1

    def __post_init__(self) -> None:
        _require_count(self.most)
        if not (self.worth > 0 and self.behind > 0):
            raise ConfigError(
                f"groups cannot be added for {self.worth} more work up to {self.behind} global batches behind: both are"
                " positive"
            )

    def form(self, workers: int) -> Groups:
        return by_rank(range(workers), 1)

    def reform(self, groups: Groups, seconds: Sequence[float]) -> Regroup | None:
        best, missed = self._up_to_worth(seconds), behind(groups, seconds)
        gain = rate_of(best, seconds) / rate_of(groups, seconds)
        if missed > self.behind * (1 + self.slack):
            return Regroup(
                best, f"a group misses {missed:.1f} global batches in an iteration, more than {self.behind:g}"
            )
        if gain > 1 + self.worth:
            slowest, fastest = (which(range(len(seconds)), key=lambda worker: seconds[worker]) for which in (max, min))
            slowdown = seconds[slowest] / seconds[fastest]
            return Regroup(
                best, f"worker {slowest} takes {slowdown:.2f} times as long as worker {fastest}: {_told(best, gain)}"
            )
        if len(best) < len(groups) and gain > 1 - self.worth / 2:
            return Regroup(best, _told(best, gain))
        return None

    def _up_to_worth(self, seconds: Sequence[float]) -> Groups:
        best, *others = each_by_speed(seconds, self.most)
        for further in others:
            enough = rate_of(further, seconds) > rate_of(best, seconds) * (1 + self.worth)
            if not enough or behind(further, seconds) > self.behind:
                break
            best = further
        return best


def behind(groups: Groups, seconds: Sequence[float]) -> float:
    """The largest number of global batches that all other groups do in one iteration of a group.

    >>> behind(((0, 1), (2, 3)), [1.0, 1.0, 1.0, 4.0])
    2.0
    """
    slowest = [max(seconds[worker] for worker in group) for group in groups]
    rates = [len(group) / each for group, each in zip(groups, slowest, strict=True)]
    return max((sum(rates) - rate) * each / len(seconds) for rate, each in zip(rates, slowest, strict=True))


def _told(groups: Groups, gain: float) -> str:
    return f"{'one group does' if len(groups) == 1 else f'{len(groups)} groups do'} {gain:.2f} times as much"


def _require_count(count: int) -> None:
    if count < 1:
        raise ConfigError(f"workers cannot be in {count} groups: use 1 or more")
