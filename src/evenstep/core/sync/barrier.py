"""Nobody runs ahead: all pushes of an iteration are one update, and then everyone goes on. BSP."""

from dataclasses import dataclass
from typing import Final, final

from evenstep.core.sync.base import Command, Commit, Push, Release, SyncPolicy, SyncStatistics
from evenstep.core.sync.roster import Roster
from evenstep.core.values import State

_BOUND: Final = 0


@final
class BarrierPolicy:
    """Bulk synchronous parallel (Valiant, CACM 33(8), 1990): an iteration ends for all together.

    Its pushes are committed as one, in order of rank, when the last of them has arrived; then all are released, in
    order of rank. Empty pushes are waited for and left out. A worker that joins in the middle of an iteration takes
    part in it; a push whose worker has left since is committed with the others.
    """

    __slots__ = ("_pushes", "_roster")

    def __init__(self) -> None:
        self._roster = Roster()
        self._pushes: list[Push] = []

    def on_join(self, worker: int, now: float) -> list[Command]:
        return [self._roster.join(worker, now, bound=_BOUND)]

    def on_push(self, push: Push, now: float) -> list[Command]:
        self._roster.push(push, now)
        self._roster.hold(push.worker)
        if push.samples:
            self._pushes.append(push)
        return self._all_when_complete(now)

    def on_leave(self, worker: int, now: float) -> list[Command]:
        self._roster.leave(worker)
        return self._all_when_complete(now)

    def waited_for(self) -> list[int]:
        return self._roster.waited_for()

    def statistics(self) -> SyncStatistics:
        return self._roster.statistics()

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        """Nothing outlasts an iteration."""

    def _all_when_complete(self, now: float) -> list[Command]:
        releases = self._roster.release_up_to(_BOUND, now, bound=_BOUND)
        if not releases and len(self._roster.progress):
            return []  # some of the iteration still run
        commits: list[Commit] = []
        if self._pushes:
            commits.append(Commit(pushes=tuple(sorted(self._pushes, key=_worker)), share=1.0))
            self._pushes = []
        return [*commits, *sorted(releases, key=_worker)]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Barrier:
    """BSP: everyone waits for the slowest in every iteration, and all pushes of an iteration are one update."""

    @property
    def in_step(self) -> bool:
        """Every iteration is one slice."""
        return True

    def policy(self, workers: int) -> SyncPolicy:
        """A new policy for a run of so many workers, none of which has joined."""
        return BarrierPolicy()


def _worker(item: Push | Release) -> int:
    return item.worker
