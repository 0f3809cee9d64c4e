"""Nobody waits for anybody. ASP."""

from dataclasses import dataclass
from typing import final

from evenstep.core.sync.alone import commit_alone
from evenstep.core.sync.base import Command, Push, SyncPolicy, SyncStatistics
from evenstep.core.sync.roster import Roster
from evenstep.core.values import State


@final
class UnboundedPolicy:
    """Asynchronous parallel: each push is committed when it arrives, and its worker released at once at any lead."""

    __slots__ = ("_roster",)

    def __init__(self) -> None:
        self._roster = Roster()

    def on_join(self, worker: int, now: float) -> list[Command]:
        return [self._roster.join(worker, now, bound=None)]

    def on_push(self, push: Push, now: float) -> list[Command]:
        self._roster.push(push, now)
        commands = commit_alone(push)
        commands.append(self._roster.release(push.worker, now, bound=None))
        return commands

    def on_leave(self, worker: int, now: float) -> list[Command]:
        self._roster.leave(worker)
        return []

    def waited_for(self) -> list[int]:
        return []

    def statistics(self) -> SyncStatistics:
        return self._roster.statistics()

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        """Leads begin anew as the workers join."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Unbounded:
    """ASP: nobody waits, and nothing bounds how far ahead a fast worker is."""

    @property
    def in_step(self) -> bool:
        """Workers go their own ways."""
        return False

    def policy(self, workers: int) -> SyncPolicy:
        """A new policy for a run of so many workers, none of which has joined."""
        return UnboundedPolicy()
