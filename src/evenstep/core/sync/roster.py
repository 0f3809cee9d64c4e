"""Who has joined, who runs and who is held: the book that every policy of this folder keeps.

Knows which events are possible in which state, how to hold and release, and what there is to count. Whom to release
when is the policies' to decide.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import final

from evenstep.core.errors import ProtocolError
from evenstep.core.sync.base import Push, Release, SyncStatistics
from evenstep.core.sync.progress import Progress


@dataclass(slots=True)
class _Member:
    """One that has joined once; it runs or is held `since` then, if it has not left."""

    since: float
    running: bool = False
    pushes: int = 0
    held_seconds: float = 0.0


@final
class Roster:
    """The workers that have joined, each running or held. No method looks at all of them.

    Attributes:
        progress: Their iterations; to be read only.
    """

    __slots__ = ("_held", "_held_at", "_largest_lead", "_members", "progress")

    def __init__(self) -> None:
        self.progress = Progress()
        self._members: dict[int, _Member] = {}  # those who have left too, for the statistics
        self._held: dict[int, dict[int, None]] = {}  # by iterations, the first that came first
        self._held_at: list[int] = []  # a heap of the iterations that _held has workers at
        self._largest_lead = 0

    def join(self, worker: int, now: float, *, bound: int | None) -> Release:
        """A worker begins and runs.

        Raises:
            ProtocolError: It has joined already.
        """
        if worker in self.progress:
            state = self._state(worker)
            raise ProtocolError(f"worker {worker} joined while it is {state}: it must leave before it joins again")
        self.progress.join(worker)
        self._members.setdefault(worker, _Member(now)).since = now
        return self.release(worker, now, bound=bound)

    def push(self, push: Push, now: float) -> float:
        """A running worker's push has arrived: how many seconds it ran. `release` it, or `hold` it.

        Raises:
            ProtocolError: The worker has not joined, or is held.
        """
        worker = push.worker
        member = self._members.get(worker)
        if member is None or not member.running:
            state = self._state(worker)
            raise ProtocolError(
                f"worker {worker} pushed its iteration {push.iteration} while it is {state}: "
                "only a worker that has joined and was released since its last push may push"
            )
        self.progress.advance(worker)
        seconds = now - member.since
        member.since = now
        member.running = False
        member.pushes += 1
        return seconds

    def release(self, worker: int, now: float, *, bound: int | None) -> Release:
        """The worker that has just joined, or whose push has just arrived, runs."""
        member, lead = self._members[worker], self.progress.lead(worker)
        held_seconds = now - member.since
        member.since = now
        member.running = True
        member.held_seconds += held_seconds
        if lead > self._largest_lead:
            self._largest_lead = lead
        return Release(worker, lead, bound, held_seconds)

    def hold(self, worker: int) -> None:
        """The worker whose push has just arrived waits until `release_up_to` comes to it."""
        iterations = self.progress.iterations(worker)
        if iterations not in self._held:
            self._held[iterations] = {}
            heappush(self._held_at, iterations)
        self._held[iterations][worker] = None

    def release_up_to(self, lead: int, now: float, *, bound: int | None) -> list[Release]:
        """Everyone runs who is held and has at most this lead: those behind first, among equals the first that came."""
        released = []
        while self._held_at and self._held_at[0] <= self.progress.slowest + lead:
            workers = self._held.pop(heappop(self._held_at))
            released += [self.release(worker, now, bound=bound) for worker in workers]
        return released

    def leave(self, worker: int) -> None:
        """A worker is gone, running or held.

        Raises:
            ProtocolError: It has not joined.
        """
        if worker not in self.progress:
            raise ProtocolError(f"worker {worker} left while it is not joined: only a worker that has joined may leave")
        self._held.get(self.progress.iterations(worker), {}).pop(worker, None)
        self._members[worker].running = False
        self.progress.leave(worker)
        if not len(self.progress):
            self._held.clear()
            self._held_at.clear()

    def waited_for(self) -> list[int]:
        """The running workers that held ones wait for, which are the slowest. Looks at all workers."""
        if not any(self._held.values()):
            return []
        return [worker for worker in self.progress.all_slowest() if self._members[worker].running]

    def running_since(self, worker: int) -> float:
        """When the release of this running worker was."""
        return self._members[worker].since

    def statistics(self) -> SyncStatistics:
        """What has happened since the roster was made."""
        return SyncStatistics(
            pushes={worker: member.pushes for worker, member in self._members.items()},
            held_seconds={worker: member.held_seconds for worker, member in self._members.items()},
            largest_lead=self._largest_lead,
        )

    def _state(self, worker: int) -> str:
        if worker not in self.progress:
            return "not joined"
        return "running" if self._members[worker].running else "held"
