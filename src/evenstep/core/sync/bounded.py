"""A worker may run ahead of the slowest by so many iterations and no more. SSP."""

from dataclasses import dataclass
from typing import final

from evenstep.core.errors import ConfigError
from evenstep.core.sync.alone import commit_alone
from evenstep.core.sync.base import Command, Push, SyncPolicy, SyncStatistics
from evenstep.core.sync.roster import Roster
from evenstep.core.values import State


@final
class BoundedPolicy:
    """Stale synchronous parallel (Ho et al., NIPS 2013): released at lead <= `bound`, held until then.

    Each push is committed when it arrives; only the release waits. So a lead is at most `bound` + 1, reached between a
    push and the release that it waits for.

    Deviation: the paper's workers read from caches whose age is bounded. Here a released worker always gets the newest
    weights, which is what DSSP (ICDCS 2019) compares itself with under this name.
    """

    __slots__ = ("_bound", "_roster")

    def __init__(self, *, bound: int) -> None:
        self._bound = bound
        self._roster = Roster()

    def on_join(self, worker: int, now: float) -> list[Command]:
        return [self._roster.join(worker, now, bound=self._bound)]

    def on_push(self, push: Push, now: float) -> list[Command]:
        self._roster.push(push, now)
        commands = commit_alone(push)
        if self._roster.progress.lead(push.worker) <= self._bound:
            commands.append(self._roster.release(push.worker, now, bound=self._bound))
        else:
            self._roster.hold(push.worker)
        commands += self._roster.release_up_to(self._bound, now, bound=self._bound)
        return commands

    def on_leave(self, worker: int, now: float) -> list[Command]:
        self._roster.leave(worker)
        return [*self._roster.release_up_to(self._bound, now, bound=self._bound)]

    def waited_for(self) -> list[int]:
        return self._roster.waited_for()

    def statistics(self) -> SyncStatistics:
        return self._roster.statistics()

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        """Leads begin anew as the workers join."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """SSP: a worker is released at a lead of at most `bound` iterations (0 or more)."""

    bound: int = 3

    def __post_init__(self) -> None:
        if self.bound < 0:
            raise ConfigError(f"a worker cannot be bounded to a lead of {self.bound}: use a bound of 0 or more")

    @property
    def in_step(self) -> bool:
        """Workers go their own ways."""
        return False

    def policy(self, workers: int) -> SyncPolicy:
        """A new policy for a run of so many workers, none of which has joined."""
        return BoundedPolicy(bound=self.bound)
