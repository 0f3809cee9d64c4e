"""SSP, where the lead of a worker over the slowest is bounded, and ASP, where it is not."""

from dataclasses import dataclass
from typing import ClassVar, final

from evenstep.core.errors import ConfigError
from evenstep.core.sync.base import Command, Push, SyncPolicy
from evenstep.core.sync.roster import Roster, commit_alone


@final
class BoundedPolicy(SyncPolicy):
    """Stale synchronous parallel (Ho et al., NIPS 2013): a worker is released at lead <= `bound` and held until then.

    Each push is committed when it arrives; only the release waits. So a lead is at most `bound` + 1, between a push and
    the release that it waits for. With `bound` None every worker is released at once: asynchronous parallel (ASP).

    Deviation: the paper's workers read from caches of bounded age. Here a released worker gets the newest weights,
    which is what DSSP (ICDCS 2019) compares itself with under this name.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._roster = Roster()

    def on_join(self, worker: int, now: float) -> list[Command]:
        return [self._roster.join(worker, now, bound=self._bound)]

    def on_push(self, push: Push, now: float) -> list[Command]:
        bound, roster = self._bound, self._roster
        roster.push(push, now)
        commands = commit_alone(push)
        if bound is None:
            commands.append(roster.release(push.worker, now, bound=None))
            return commands
        if roster.lead(push.worker) <= bound:
            commands.append(roster.release(push.worker, now, bound=bound))
        else:
            roster.hold(push.worker)
        return commands + roster.release_up_to(bound, now, bound=bound)

    def on_leave(self, worker: int, now: float) -> list[Command]:
        self._roster.leave(worker)
        return [] if self._bound is None else [*self._roster.release_up_to(self._bound, now, bound=self._bound)]

    def waited_for(self) -> list[int]:
        return self._roster.waited_for()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """SSP: a worker is released at a lead of at most `bound` iterations (0 or more)."""

    in_step: ClassVar = False

    bound: int = 3

    def __post_init__(self) -> None:
        if self.bound < 0:
            raise ConfigError(f"a worker cannot be bounded to a lead of {self.bound}: use a bound of 0 or more")

    def policy(self, workers: int) -> SyncPolicy:
        return BoundedPolicy(self.bound)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Unbounded:
    """ASP: no worker waits, and nothing bounds how far ahead a fast worker is."""

    in_step: ClassVar = False

    def policy(self, workers: int) -> SyncPolicy:
        return BoundedPolicy(None)
