"""A sync policy under watch: every event and command is held against a plain book of who has done what."""

from typing import Final, final

from evenstep.core.sync.base import Command, Commit, Push, Release, SyncPolicy, SyncStatistics
from evenstep.core.values import State

_NEVER_HELD: Final = 0.0


@final
class Watched:
    """A policy that passes everything on to another and raises AssertionError where that breaks a promise.

    The promises are those of `SyncPolicy`: impossible events are refused; a worker is released only when it is held,
    and at lead <= bound, so that its next push is at lead <= bound + 1; each push that has arrived is committed once,
    and empty ones never; somebody who has joined is always running; nothing is left uncommitted when all have left; the
    statistics are the sums of the commands. The book is kept by looking at every worker at every event.
    """

    def __init__(self, policy: SyncPolicy) -> None:
        self._policy = policy
        self._iterations: dict[int, int] = {}
        self._bounds: dict[int, int | None] = {}  # of the running workers, from their releases
        self._held_since: dict[int, float] = {}
        self._uncommitted: set[Push] = set()
        self._pushes: dict[int, int] = {}
        self._held_seconds: dict[int, float] = {}
        self._largest_lead = 0

    @property
    def running(self) -> list[int]:
        """The workers that run, in order of rank."""
        return sorted(self._bounds)

    @property
    def held(self) -> list[int]:
        """The workers that are held, in order of rank."""
        return sorted(self._held_since)

    def lead(self, worker: int) -> int:
        """Of a worker that has joined."""
        return self._iterations[worker] - min(self._iterations.values())

    def on_join(self, worker: int, now: float) -> list[Command]:
        """Pass the event on, and check the commands."""
        commands = self._policy.on_join(worker, now)
        assert worker not in self._iterations, f"worker {worker} could join twice"
        self._iterations[worker] = min(self._iterations.values(), default=0)
        self._held_since[worker] = now
        self._pushes.setdefault(worker, 0)
        self._held_seconds.setdefault(worker, _NEVER_HELD)
        self._check(commands, now)
        assert worker in self._bounds, f"worker {worker} has joined and was not released"
        return commands

    def on_push(self, push: Push, now: float) -> list[Command]:
        """Pass the event on, and check the commands."""
        commands = self._policy.on_push(push, now)
        worker = push.worker
        assert worker in self._bounds, f"worker {worker} could push without being released"
        bound = self._bounds.pop(worker)
        self._iterations[worker] += 1
        self._held_since[worker] = now
        self._pushes[worker] += 1
        if push.samples:
            self._uncommitted.add(push)
        beyond = bound is not None and self.lead(worker) > bound + 1
        assert not beyond, f"worker {worker} leads by {self.lead(worker)} after a release at bound {bound}"
        self._check(commands, now)
        return commands

    def on_leave(self, worker: int, now: float) -> list[Command]:
        """Pass the event on, and check the commands."""
        commands = self._policy.on_leave(worker, now)
        assert worker in self._iterations, f"worker {worker} could leave without having joined"
        del self._iterations[worker]
        self._bounds.pop(worker, None)
        self._held_since.pop(worker, None)
        self._check(commands, now)
        return commands

    def waited_for(self) -> list[int]:
        """The policy's, checked: they run, and there are none exactly where nobody is held."""
        waited = self._policy.waited_for()
        assert set(waited) <= self._bounds.keys(), f"{waited} are waited for, but {self.running} run"
        assert bool(waited) == bool(self._held_since), f"{waited} are waited for, and {self.held} held"
        return waited

    def statistics(self) -> SyncStatistics:
        """The policy's, checked."""
        statistics = self._policy.statistics()
        watched = SyncStatistics(pushes=self._pushes, held_seconds=self._held_seconds, largest_lead=self._largest_lead)
        assert statistics == watched, f"{statistics} should be {watched}"
        return statistics

    def state_dict(self) -> State:
        """The policy's."""
        return self._policy.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Pass it on."""
        self._policy.load_state_dict(state)

    def _check(self, commands: list[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, Commit):
                self._commit(command)
            elif isinstance(command, Release):
                self._release(command, now)
            else:  # Leads begin anew in other groups.
                self._iterations = dict.fromkeys(self._iterations, 0)
        assert self._bounds or not self._iterations, f"nobody runs, and {self.held} are held"
        assert self._iterations or not self._uncommitted, f"all have left, and {self._uncommitted} are not committed"

    def _commit(self, commit: Commit) -> None:
        assert commit.pushes, "a commit is empty"
        assert commit.share > 0.0, f"{commit} stands for nothing"
        for push in commit.pushes:
            assert push in self._uncommitted, f"{push} was committed twice, or is empty, or never arrived"
            self._uncommitted.remove(push)

    def _release(self, release: Release, now: float) -> None:
        worker = release.worker
        assert worker in self._held_since, f"{release} is of a worker that is not held"
        assert release.lead == self.lead(worker), f"{release} has a lead of {self.lead(worker)}"
        assert release.bound is None or release.lead <= release.bound, f"{release} is beyond its bound"
        held_seconds = now - self._held_since.pop(worker)
        assert release.held_seconds == held_seconds, f"{release} was held for {held_seconds} s"
        self._bounds[worker] = release.bound
        self._held_seconds[worker] += held_seconds
        self._largest_lead = max(self._largest_lead, release.lead)
