"""BSP: all pushes of an iteration are one update, after which all workers continue."""

from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar, final

from evenstep.core.sync.base import Command, Commit, Push, SyncPolicy
from evenstep.core.sync.roster import Roster


@final
class BarrierPolicy(SyncPolicy):
    """Bulk synchronous parallel (Valiant, CACM 33(8), 1990).

    When the last push of an iteration arrives, all of them are committed as one, ordered by rank, and then all workers
    are released, ordered by rank. The barrier waits for empty pushes and leaves them out of the commit. A worker that
    joins during an iteration takes part in it. The push of a worker that has left is committed with the others.
    """

    def __init__(self) -> None:
        self._roster = Roster()
        self._pushes: list[Push] = []

    def on_join(self, worker: int, now: float) -> list[Command]:
        return [self._roster.join(worker, now, bound=0)]

    def on_push(self, push: Push, now: float) -> list[Command]:
        self._roster.push(push, now)
        self._roster.hold(push.worker)
        if push.samples:
            self._pushes.append(push)
        return self._commit_if_complete(now)

    def on_leave(self, worker: int, now: float) -> list[Command]:
        self._roster.leave(worker)
        return self._commit_if_complete(now)

    def waited_for(self) -> list[int]:
        return self._roster.waited_for()

    def _commit_if_complete(self, now: float) -> list[Command]:
        releases = self._roster.release_up_to(0, now, bound=0)
        if not releases and len(self._roster):
            return []  # Some workers still run.
        commands: list[Command] = []
        if self._pushes:
            commands.append(Commit(tuple(sorted(self._pushes, key=_worker)), 1.0))
            self._pushes = []
        return commands + sorted(releases, key=_worker)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """BSP: all workers wait for the slowest in every iteration, and all pushes of an iteration are one update."""

    in_step: ClassVar = True

    def policy(self, workers: int) -> SyncPolicy:
        return BarrierPolicy()


_worker = attrgetter("worker")
