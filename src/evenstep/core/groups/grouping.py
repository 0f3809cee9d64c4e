"""The answer to *with whom* as a part of a scheme: who forms groups, and when they are formed anew."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, final

from evenstep.core.errors import ConfigError
from evenstep.core.groups.form import Groups, by_rank, by_speed, each_by_speed, rate_of, require_partition

_WORTH_IT: Final = 0.1
"""New groups must do so much more than the present ones: to form them, all wait once, and speeds are noisy."""
_BEYOND: Final = 1.1
"""Groups that are as stale as they may be stay up to this times as much, or noise would form them and give them up."""


class Reformed(NamedTuple):
    """Other groups than before, and one sentence that says why."""

    groups: Groups
    reason: str


class Grouping(Protocol):
    """Forms groups. Pure: what is known of the workers comes as arguments."""

    def form(self, workers: int) -> Groups:
        """The groups of the ranks 0 to `workers` - 1 before their speeds are known.

        Raises:
            ConfigError: There are no such groups of so many workers.
        """

    def reform(self, groups: Groups, seconds: Sequence[float]) -> Reformed | None:
        """Other groups, where they are worth it; `seconds` of each worker's iteration, by rank, as they are now."""


@final
@dataclass(frozen=True, slots=True)
class Given:
    """The groups that the user gave; they stay."""

    groups: Groups

    def form(self, workers: int) -> Groups:
        require_partition(self.groups, workers)
        return self.groups

    def reform(self, groups: Groups, seconds: Sequence[float]) -> Reformed | None:
        return None


@final
@dataclass(frozen=True, slots=True)
class ByHost:
    """The workers of a host are a group, so that heavy traffic stays off the network; `Given` once hosts are known."""

    def form(self, workers: int) -> Groups:
        raise ConfigError(f"the hosts of the {workers} workers are not known: give their groups, such as 0-3/4-7")

    def reform(self, groups: Groups, seconds: Sequence[float]) -> Reformed | None:
        return None


@final
@dataclass(frozen=True, slots=True)
class ByRank:
    """So many groups of neighbours by rank; they stay."""

    count: int

    def __post_init__(self) -> None:
        _require_count(self.count)

    def form(self, workers: int) -> Groups:
        return by_rank(range(workers), self.count)

    def reform(self, groups: Groups, seconds: Sequence[float]) -> Reformed | None:
        return None


@final
@dataclass(frozen=True, slots=True)
class BySpeed:
    """At most so many groups of workers of similar speed, formed anew when speeds have moved."""

    count: int

    def __post_init__(self) -> None:
        _require_count(self.count)

    def form(self, workers: int) -> Groups:
        return by_rank(range(workers), self.count)

    def reform(self, groups: Groups, seconds: Sequence[float]) -> Reformed | None:
        best = by_speed(seconds, self.count)
        gain = rate_of(best, seconds) / rate_of(groups, seconds)
        return Reformed(best, f"of similar speed {_told(best, gain)}") if gain > 1 + _WORTH_IT else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Progressive:
    """As few groups as the stragglers allow: one as long as nobody is slow, more while each is worth it.

    Basu et al. (HiPC 2018) raise the number of groups as a delay grows, up to what accuracy allows, and do not say
    how; we take a further group where the predicted work grows by `worth` of what it is, with groups of similar speed,
    as long as no group is predicted to fall behind by more than `behind` global batches in one of its iterations,
    and give it up as soon as it does not add half of that any more, or a group falls behind by a tenth more than that.

    Args:
        worth: part of the present work that a further group must add; more than 0.
        behind: global batches that all others may do in one iteration of any group; more than 0.
        most: groups; 1 or more.
    """

    worth: float = _WORTH_IT
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
        if missed > self.behind * _BEYOND:
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


def _told(groups: Groups, gain: float) -> str:
    return f"{'one group does' if len(groups) == 1 else f'{len(groups)} groups do'} {gain:.2f} times as much"


def behind(groups: Groups, seconds: Sequence[float]) -> float:
    """Global batches that all other groups do in one iteration of a group; of the group where it is most.

    >>> behind(((0, 1), (2, 3)), [1.0, 1.0, 1.0, 4.0])
    2.0
    """
    slowest = [max(seconds[worker] for worker in group) for group in groups]
    rates = [len(group) / each for group, each in zip(groups, slowest, strict=True)]
    return max((sum(rates) - rate) * each / len(seconds) for rate, each in zip(rates, slowest, strict=True))


def _require_count(count: int) -> None:
    if count < 1:
        raise ConfigError(f"workers cannot be in {count} groups: use 1 or more")
