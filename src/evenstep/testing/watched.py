"""Checks each event and command of a sync policy against an independent record of what each worker has done."""

from typing import final

from evenstep.core.sync.base import Command, Commit, Push, Release, SyncPolicy
from evenstep.core.values import State


@final
class Watched:
    """A sync policy that forwards to another one and raises AssertionError if that one breaks a promise.

    It checks the promises of `SyncPolicy`: impossible events are refused; only held workers are released, at lead <=
    bound, so that their next push is at lead <= bound + 1; each push with samples is committed exactly once; while
    workers are joined, at least one of them runs; all pushes are committed when the last worker has left. Each event
    costs time proportional to the number of workers.

    Attributes:
        pushes: The number of pushes by worker.
        held_seconds: The total time that each worker was held.
        largest_lead: The largest lead at any release.
    """

    def __init__(self, policy: SyncPolicy) -> None:
        self._policy = policy
        self._iterations: dict[int, int] = {}
        self._bounds: dict[int, int | None] = {}  # The bounds of running workers, from their releases.
        self._held_since: dict[int, float] = {}
        self._uncommitted: set[Push] = set()
        self.pushes: dict[int, int] = {}
        self.held_seconds: dict[int, float] = {}
        self.largest_lead = 0

    @property
    def running(self) -> list[int]:
        """The running workers, in order of rank."""
        return sorted(self._bounds)

    @property
    def held(self) -> list[int]:
        """The held workers, in order of rank."""
        return sorted(self._held_since)

    def lead(self, worker: int) -> int:
        """The completed iterations of a joined worker minus the slowest worker's."""
        return self._iterations[worker] - min(self._iterations.values())

    def on_join(self, worker: int, now: float) -> list[Command]:
        """Forward the event and check the commands."""
        commands = self._policy.on_join(worker, now)
        assert worker not in self._iterations, f"worker {worker} could join twice"
        self._iterations[worker] = min(self._iterations.values(), default=0)
        self._held_since[worker] = now
        self.pushes.setdefault(worker, 0)
        self.held_seconds.setdefault(worker, 0.0)
        self._check(commands, now)
        assert worker in self._bounds, f"worker {worker} has joined and was not released"
        return commands

    def on_push(self, push: Push, now: float) -> list[Command]:
        """Forward the event and check the commands."""
        commands = self._policy.on_push(push, now)
        worker = push.worker
        assert worker in self._bounds, f"worker {worker} could push without being released"
        bound = self._bounds.pop(worker)
        self._iterations[worker] += 1
        self._held_since[worker] = now
        self.pushes[worker] += 1
        if push.samples:
            self._uncommitted.add(push)
        beyond = bound is not None and self.lead(worker) > bound + 1
        assert not beyond, f"worker {worker} leads by {self.lead(worker)} after a release at bound {bound}"
        self._check(commands, now)
        return commands

    def on_leave(self, worker: int, now: float) -> list[Command]:
        """Forward the event and check the commands."""
        commands = self._policy.on_leave(worker, now)
        assert worker in self._iterations, f"worker {worker} could leave without having joined"
        del self._iterations[worker]
        self._bounds.pop(worker, None)
        self._held_since.pop(worker, None)
        self._check(commands, now)
        return commands

    def waited_for(self) -> list[int]:
        """The policy's answer: running workers, and none if and only if no worker is held."""
        waited = self._policy.waited_for()
        assert set(waited) <= self._bounds.keys(), f"{waited} are waited for, but {self.running} run"
        assert bool(waited) == bool(self._held_since), f"{waited} are waited for, and {self.held} held"
        return waited

    def state_dict(self) -> State:
        """The state of the policy."""
        return self._policy.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Load a state of the policy."""
        self._policy.load_state_dict(state)

    def _check(self, commands: list[Command], now: float) -> None:
        for command in commands:
            if isinstance(command, Commit):
                self._commit(command)
            elif isinstance(command, Release):
                self._release(command, now)
            else:  # New groups: leads restart at zero.
                self._iterations = dict.fromkeys(self._iterations, 0)
        assert self._bounds or not self._iterations, f"no worker runs, and {self.held} are held"
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
        self.held_seconds[worker] += held_seconds
        self.largest_lead = max(self.largest_lead, release.lead)
