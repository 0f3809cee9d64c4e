"""The answer to *with whom* as a part of a scheme: which groups are formed, and when they are formed again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, final

from evenstep.core.errors import ConfigError
from evenstep.core.groups.form import Groups, by_rank, by_speed, each_by_speed, rate_of, require_partition

_MIN_GAIN: Final = 0.1
"""Minimum throughput gain that justifies regrouping, which costs one barrier."""
_TOLERANCE: Final = 1.1
"""Existing groups may exceed the limit of staleness by this factor, or noise would form them and give them up."""


class Reformed(NamedTuple):
    """Other groups than before, and one sentence that says why."""

    groups: Groups
    reason: str


class Grouping(Protocol):
    """Forms groups. Pure: what is known of the workers comes as arguments."""

    def form(self, workers: int) -> Groups:
        """The groups of the ranks 0 to `workers` - 1 before their speeds are known.

        Raises:
            ConfigError: There are no such groups of this many workers.
        """

    def reform(self, groups: Groups, seconds: Sequence[float]) -> Reformed | None:
        """Other groups if they are worth it, given the present time of each worker's iteration by rank."""
        return None


@final
@dataclass(frozen=True, slots=True)
class Given(Grouping):
    """The groups that the user gave; they stay."""

    groups: Groups

    def form(self, workers: int) -> Groups:
        require_partition(self.groups, workers)
        return self.groups


@final
@dataclass(frozen=True, slots=True)
class ByHost(Grouping):
    """The workers of a host are a group, so that heavy traffic stays off the network; `Given` once hosts are known."""

    def form(self, workers: int) -> Groups:
        raise ConfigError(f"the hosts of the {workers} workers are not known: give their groups, such as 0-3/4-7")


@final
@dataclass(frozen=True, slots=True)
class ByRank(Grouping):
    """This many groups of neighbours by rank; they stay."""

    count: int

    def __post_init__(self) -> None:
        _require_count(self.count)

    def form(self, workers: int) -> Groups:
        return by_rank(range(workers), self.count)


@final
@dataclass(frozen=True, slots=True)
class BySpeed(Grouping):
    """At most `count` groups of workers of similar speed, formed again when speeds have changed."""

    count: int

    def __post_init__(self) -> None:
        _require_count(self.count)

    def form(self, workers: int) -> Groups:
        return by_rank(range(workers), self.count)

    def reform(self, groups: Groups, seconds: Sequence[float]) -> Reformed | None:
        best = by_speed(seconds, self.count)
        gain = rate_of(best, seconds) / rate_of(groups, seconds)
        return Reformed(best, f"of similar speed {_told(best, gain)}") if gain > 1 + _MIN_GAIN else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Progressive(Grouping):
    """As few groups as the stragglers allow: one while no worker is slow, more while each is worth it.

    Basu et al. (HiPC 2018) raise the number of groups as a delay grows, up to what accuracy allows, and do not say how.
    We add a group of similar speed while the predicted work grows by `worth` of what it is, and no group is predicted
    to fall behind by more than `behind` global batches in one of its iterations. We remove one as soon as it does not
    add half of that, or a group falls behind by a tenth more than that.

    Args:
        worth: fraction of the present work that a further group must add; more than 0.
        behind: global batches that all others may do in one iteration of any group; more than 0.
        most: largest number of groups; 1 or more.
    """

    worth: float = _MIN_GAIN
    behind: float = 10.0
    most: int = 8

    def __post_init__(self) -> None:
        _require_count(self.most)
        if not (self.worth > 0 and self.behind > 0):
            raise ConfigError(
                f"groups cannot be added for {self.worth} more work up to {self.behind} global batches behind: both are"
                " positive"
            )

    def form(self, workers: int) -> Groups:
        return by_rank(range(workers), 1)

    def reform(self, groups: Groups, seconds: Sequence[float]) -> Reformed | None:
        best, missed = self._up_to_worth(seconds), behind(groups, seconds)
        gain = rate_of(best, seconds) / rate_of(groups, seconds)
        if missed > self.behind * _TOLERANCE:
            return Reformed(
                best, f"a group misses {missed:.1f} global batches in an iteration, more than {self.behind:g}"
            )
        if gain > 1 + self.worth:
            slowest, fastest = (which(range(len(seconds)), key=lambda worker: seconds[worker]) for which in (max, min))
            slowdown = seconds[slowest] / seconds[fastest]
            return Reformed(
                best, f"worker {slowest} takes {slowdown:.2f} times as long as worker {fastest}: {_told(best, gain)}"
            )
        if len(best) < len(groups) and gain > 1 - self.worth / 2:
            return Reformed(best, _told(best, gain))
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
    """The most global batches that all other groups do in one iteration of a group.

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
