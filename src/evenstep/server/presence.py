"""Which workers shard 0 hears from, and which ones keep others waiting for too long."""

from collections.abc import Iterable, Mapping
from typing import final

from evenstep.core.activity import Doing, Seen
from evenstep.core.coordinate import Heartbeats, Patience
from evenstep.core.supervision import Why
from evenstep.server.worker_slot import WorkerSlot


@final
class Presence:
    """The pulses and requests of all workers, by time. It detects silent and hanging workers.

    Args:
        slots: The workers that are here, by rank.
        heartbeat_seconds: How long a worker may be silent.
        now: The present time, on a clock that does not go back.
    """

    def __init__(self, slots: Mapping[int, WorkerSlot], heartbeat_seconds: float, now: float) -> None:
        self._slots = slots
        self._heartbeats = Heartbeats(heartbeat_seconds)
        self._patience = Patience()
        self._seen: dict[int, tuple[Seen, float]] = {}
        """The activity that each worker reported last, and when."""
        self._late_seconds = heartbeat_seconds / 2
        self._looked = now

    def expect(self, worker: int, now: float) -> None:
        """The worker should join within a heartbeat."""
        self._heartbeats.heard(worker, now)

    def joined(self, worker: int, limit_seconds: float, now: float) -> None:
        """The worker has joined. It may keep others waiting for `limit_seconds`."""
        self._heartbeats.heard(worker, now)
        self._patience.joined(worker, limit_seconds)

    def left(self, worker: int) -> None:
        """The worker has left, or is no longer expected."""
        self._heartbeats.forget(worker)
        self._patience.left(worker)

    def heard(self, worker: int, now: float) -> None:
        """Something arrived from the worker."""
        if worker in self._slots:
            self._heartbeats.heard(worker, now)

    def asked(self, worker: int, now: float) -> None:
        """The main thread of the worker made a request."""
        self.heard(worker, now)
        self._patience.asked(worker)

    def pulse(self, worker: int, seen: Seen, now: float) -> None:
        """The worker sent a pulse, with the activity of its main thread."""
        self.heard(worker, now)
        self._seen[worker] = seen, now

    def last_activity(self, worker: int, why: Why, seconds: float, now: float) -> str:
        """What a worker that has left was doing, in words; empty if unknown."""
        seen, at = self._seen.pop(worker, ("", 0.0))
        if why is Why.HUNG and now - at >= seconds:
            return "nothing was heard from it in that time"
        return str(seen)

    def look(self, now: float) -> None:
        """To be called often. If this process stood still itself, the silence of the workers means nothing."""
        if now - self._looked > self._late_seconds:
            self._heartbeats.hear_all(now)
            self._patience.start_over()
        self._looked = now

    def silent(self, now: float) -> list[int]:
        """The workers that were silent for longer than a heartbeat. An arriving gradient has its own time limit."""
        return [
            worker
            for worker in self._heartbeats.silent(now)
            if worker not in self._slots or not self._slots[worker].receiving
        ]

    def hanging(self, waited_for: Iterable[int], now: float) -> list[tuple[int, float]]:
        """The workers for which others have waited too long, with the limit in seconds.

        A worker that reports that it waits itself, for example for its group, is not counted.
        """
        waited = [worker for worker in waited_for if not self._reports_waiting(worker)]
        return [(worker, self._patience.limit_seconds(worker)) for worker in self._patience.exceeded(waited, now)]

    def _reports_waiting(self, worker: int) -> bool:
        slot = self._slots.get(worker)
        if slot is None or slot.receiving:
            return True
        return worker in self._seen and self._seen[worker][0].doing is Doing.WAITING
