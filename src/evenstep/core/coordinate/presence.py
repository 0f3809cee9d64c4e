"""Finds workers that have fallen silent or have kept others waiting for too long.

Servers use it for workers, and the process that starts servers uses it for servers. Times are seconds of any monotonic
clock.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import final

from evenstep.core.activity import Doing, Seen
from evenstep.core.supervision import Why


@final
@dataclass(frozen=True, slots=True)
class Lost:
    """A worker that never came, was silent or kept others waiting for this many seconds."""

    worker: int
    why: Why
    seconds: float


@dataclass(slots=True)
class _Signs:
    heard: float
    limit_seconds: float | None = None
    """How long the worker may keep others waiting; None before it has joined."""
    waited_for_since: float | None = None
    seen: Seen | None = None
    seen_at: float = -math.inf


@final
class Presence:
    """Keeps when each worker was last heard from.

    A worker may be silent for `heartbeat_seconds`. One whose pulse goes on may still hang in its script, which is a
    fault only if others wait for it.
    """

    def __init__(self, heartbeat_seconds: float = math.inf) -> None:
        self._heartbeat_seconds = heartbeat_seconds
        self._workers: dict[int, _Signs] = {}
        self._looked = -math.inf

    def expect(self, worker: int, now: float) -> None:
        """The worker should join within a heartbeat."""
        self._workers[worker] = _Signs(now)

    def joined(self, worker: int, limit_seconds: float, now: float) -> None:
        """The worker has joined. It may keep others waiting for `limit_seconds`."""
        self._workers[worker] = _Signs(now, limit_seconds)

    def left(self, worker: int) -> None:
        """The worker has left, or is no longer expected."""
        self._workers.pop(worker, None)

    def heard(self, worker: int, now: float, seen: Seen | None = None) -> None:
        """Something arrived from the worker; a pulse also tells its main thread's activity."""
        state = self._workers.get(worker)
        if state is None or state.limit_seconds is None:
            return
        state.heard = now
        if seen is not None:
            state.seen, state.seen_at = seen, now

    def asked(self, worker: int, now: float) -> None:
        """The main thread of the worker made a request, so it does not hang."""
        self.heard(worker, now)
        if worker in self._workers:
            self._workers[worker].waited_for_since = None

    def last_activity(self, worker: int, now: float, hung_seconds: float = math.inf) -> str:
        """The worker's last known activity, in words; empty if not known."""
        state = self._workers.get(worker)
        if state is not None and state.seen is not None and now - state.seen_at < hung_seconds:
            return str(state.seen)
        return "" if hung_seconds == math.inf else "nothing was heard from it in that time"

    def look(self, now: float, waited_for: Collection[int] = (), receiving: Collection[int] = ()) -> list[Lost]:
        """The lost workers: those that are silent, or else those that keep others waiting. Call this often.

        Workers whose gradients are arriving (`receiving`) are not lost, since that has a time limit of its own.
        """
        if now - self._looked > self._heartbeat_seconds / 2:
            # This process itself stood still, so the silence until now means nothing.
            for state in self._workers.values():
                state.heard, state.waited_for_since = now, None
        self._looked = now
        silent, hung = [], []
        for worker, state in sorted(self._workers.items()):
            if worker not in receiving and now - state.heard > self._heartbeat_seconds:
                why = Why.NEVER_CAME if state.limit_seconds is None else Why.SILENT
                silent.append(Lost(worker, why, self._heartbeat_seconds))
            # A worker that waits itself, for example for its group, does not keep others waiting.
            waits = state.seen is not None and state.seen.doing is Doing.WAITING
            if worker not in waited_for or worker in receiving or waits or state.limit_seconds is None:
                state.waited_for_since = None
                continue
            if state.waited_for_since is None:
                state.waited_for_since = now
            if now - state.waited_for_since > state.limit_seconds:
                hung.append(Lost(worker, Why.HUNG, state.limit_seconds))
        return silent or hung
