"""The state that every sync policy keeps: how far each worker is, and whether it is running or held."""

from collections import defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import final

from evenstep.core.errors import ProtocolError
from evenstep.core.sync.base import Command, Commit, Push, Release


@dataclass(slots=True)
class _Member:
    """A worker that has joined. `since`: time of its last release (running) or push (held)."""

    iterations: int
    since: float
    running: bool = True


@final
class Roster:
    """The joined workers and their iterations. It checks events; policies decide whom to release.

    Every method except `waited_for` takes amortised constant time per push.

    Attributes:
        slowest, fastest: iterations of the slowest and the fastest worker, 0 without workers. Read-only.
    """

    __slots__ = ("_at", "_held", "_held_at", "_members", "fastest", "slowest")

    def __init__(self) -> None:
        self.slowest = 0
        self.fastest = 0
        self._members: dict[int, _Member] = {}
        # Workers by iterations, in the order in which they arrived there; for the held ones also a heap of the keys.
        self._at: defaultdict[int, dict[int, None]] = defaultdict(dict)
        self._held: dict[int, dict[int, None]] = {}
        self._held_at: list[int] = []

    def __len__(self) -> int:
        return len(self._members)

    def join(self, worker: int, now: float, *, bound: int | None) -> Release:
        """Add a running worker, level with the slowest.

        Raises:
            ProtocolError: The worker has joined already.
        """
        if worker in self._members:
            state = self._state(worker)
            raise ProtocolError(f"worker {worker} joined while it is {state}: it must leave before it joins again")
        self._members[worker] = _Member(self.slowest, now)
        self._at[self.slowest][worker] = None
        return Release(worker, 0, bound, 0.0)

    def push(self, push: Push, now: float) -> float:
        """Count a running worker's push; return the seconds that it ran. `release` or `hold` the worker next.

        Raises:
            ProtocolError: The worker has not joined, or is held.
        """
        worker = push.worker
        member = self._members.get(worker)
        if member is None or not member.running:
            raise ProtocolError(
                f"worker {worker} pushed its iteration {push.iteration} while it is {self._state(worker)}: "
                "only a worker that has joined and was released since its last push may push"
            )
        seconds = now - member.since
        member.since = now
        member.running = False
        done = member.iterations
        member.iterations = next_ = done + 1
        level = self._at[done]
        del level[worker]
        if not level:
            del self._at[done]
            if done == self.slowest:
                self.slowest = next_
        if done == self.fastest:
            self.fastest = next_
        self._at[next_][worker] = None
        return seconds

    def lead(self, worker: int) -> int:
        """Iterations of this joined worker minus the slowest's."""
        return self._members[worker].iterations - self.slowest

    def release(self, worker: int, now: float, *, bound: int | None) -> Release:
        """Let this worker, whose push has just arrived, run."""
        member = self._members[worker]
        held_seconds = now - member.since
        member.since = now
        member.running = True
        return Release(worker, member.iterations - self.slowest, bound, held_seconds)

    def hold(self, worker: int) -> None:
        """Keep this worker, whose push has just arrived, until `release_up_to` reaches its lead."""
        iterations = self._members[worker].iterations
        if iterations not in self._held:
            self._held[iterations] = {}
            heappush(self._held_at, iterations)
        self._held[iterations][worker] = None

    def release_up_to(self, lead: int, now: float, *, bound: int | None) -> list[Release]:
        """Release all held workers with at most this lead: those behind first, equals in the order of their pushes."""
        released = []
        while self._held_at and self._held_at[0] <= self.slowest + lead:
            workers = self._held.pop(heappop(self._held_at))
            released += [self.release(worker, now, bound=bound) for worker in workers]
        return released

    def leave(self, worker: int) -> None:
        """Remove a worker. After the last one, iterations count from 0 again.

        Raises:
            ProtocolError: The worker has not joined.
        """
        member = self._members.pop(worker, None)
        if member is None:
            raise ProtocolError(f"worker {worker} left while it is not joined: only a worker that has joined may leave")
        self._held.get(member.iterations, {}).pop(worker, None)
        del self._at[member.iterations][worker]
        if not self._at[member.iterations]:
            del self._at[member.iterations]
        if not self._members:
            self.slowest = self.fastest = 0
            self._held.clear()
            self._held_at.clear()
            return
        while self.slowest not in self._at:
            self.slowest += 1
        while self.fastest not in self._at:
            self.fastest -= 1

    def last_of_slowest(self) -> int:
        """The slowest worker; of several, the one that arrived at this iteration last. There must be one."""
        return next(reversed(self._at[self.slowest]))

    def running_since(self, worker: int) -> float:
        """Time of the release of this running worker."""
        return self._members[worker].since

    def waited_for(self) -> list[int]:
        """The running workers that held ones wait for: the slowest ones."""
        if not any(self._held.values()):
            return []
        return sorted(worker for worker in self._at[self.slowest] if self._members[worker].running)

    def _state(self, worker: int) -> str:
        if worker not in self._members:
            return "not joined"
        return "running" if self._members[worker].running else "held"


def commit_alone(push: Push) -> list[Command]:
    """The commit of this push as a step on its share of the global batch; nothing for an empty push."""
    return [Commit((push,), push.share)] if push.samples else []
