"""Watches the workers of a run: reports what happens to them, and ends those that hang."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeAlias, final

import psutil

from evenstep.core.absence import Absence
from evenstep.core.ending import Ending
from evenstep.core.supervision import Action, End, Restarts, Say, Stop, Supervision
from evenstep.launch.supervisor import Supervisor
from evenstep.telemetry.events import WorkerFailed
from evenstep.telemetry.say import say

POLL_SECONDS: Final = 0.2
"""How often to check how workers have ended."""
END_SECONDS: Final = 5.0
"""How long a worker that is to end may take."""

Decides: TypeAlias = Supervision | Restarts


@final
class Watch:
    """Watches the workers while they run: in a thread if used as a context manager, else whenever `look` is called.

    Args:
        status_dir: Where keepers write down how workers end; None if there are no keepers.
        decides: What to report and do; the first for runs on servers, the second for those of torchrun's agent.
        record: Receives a record of each failure of a worker.
        say: Reports a sentence to the user.
        end_seconds: How long a worker that is to end may take.
        absence: Finds workers that keep others waiting, if they do not find them themselves.
        marks: The folder in which each worker that calls `prepare` leaves a file, for `absence`.

    Attributes:
        stopped: Why the run was ended, if it was.
        to_end: The workers that are to end.
    """

    def __init__(
        self,
        status_dir: Path | None,
        decides: Decides,
        *,
        record: Callable[[WorkerFailed], None] = lambda event: None,
        say: Callable[[str], None] = say,
        end_seconds: float = END_SECONDS,
        absence: Absence | None = None,
        marks: Path | None = None,
    ) -> None:
        self._status_dir = status_dir
        self._decides = decides
        self._record = record
        self._say = say
        self._end_seconds = end_seconds
        self._absence = absence
        self._marks = marks
        self._known: dict[int, float] = {}
        """Time of the latest known end of each worker, by the clock of its keeper."""
        self._ending: dict[int, Supervisor] = {}
        """The workers that were asked to end."""
        self.to_end: set[int] = set()
        self.stopped: str | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="evenstep-watch")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()
        self.look(last=True)

    def told(self, event: Mapping[str, object]) -> None:
        """Shard 0 reports that a worker has come or gone; from any thread."""
        assert isinstance(self._decides, Supervision)
        with self._lock:
            self._act(self._decides.told(event, time.monotonic()))

    def was_asked(self, worker: int) -> bool:
        """Whether this worker was asked to end."""
        return worker in self._ending

    def look(self, *, last: bool = False) -> None:
        """Report and do what has become due; `last`: all workers have ended."""
        with self._lock:
            if self._status_dir is not None:
                self._look_at_ends(self._status_dir)
            self._act(self._decides.look(time.monotonic(), last=last))
            if self._status_dir is not None:
                if self._absence is not None:
                    self._look_at_processes(self._absence, self._status_dir)
                self._end_workers(self._status_dir)

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            self.look()

    def _look_at_ends(self, status_dir: Path) -> None:
        for ending in read_endings(status_dir):
            if self._known.get(ending.worker) == ending.at_seconds:
                continue
            self._known[ending.worker] = ending.at_seconds
            if self._absence is not None:  # If it is started again, then as another process.
                self.to_end.discard(ending.worker)
                self._ending.pop(ending.worker, None)
            if ending.asked_to_end:
                continue
            if ending.failed:
                self._record(WorkerFailed(worker=ending.worker, how=ending.how))
            self._act(self._decides.ended(ending))

    def _look_at_processes(self, absence: Absence, status_dir: Path) -> None:
        running = {group.worker: group.leader for group in read_groups(status_dir)}
        done = {ending.worker for ending in read_endings(status_dir) if not ending.failed}
        came = {int(file.name) for file in self._marks.iterdir() if file.name.isdigit()} if self._marks else ()
        stopped = [worker for worker, leader in running.items() if is_stopped(leader)]
        self._act(absence.look(time.monotonic(), running=running, stopped=stopped, done=done, came=came))

    def _end_workers(self, status_dir: Path) -> None:
        """End workers that are to end: their keepers end them, and do not restart them then."""
        for group in read_groups(status_dir):
            if self.stopped is not None or group.worker in self.to_end:
                supervisor = self._ending.setdefault(group.worker, Supervisor(group.keeper, -group.leader))
                supervisor.end(self._end_seconds)

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Say(text):
                    self._say(text)
                case End(worker):
                    self.to_end.add(worker)
                case Stop(why):
                    self.stopped = why


def read_endings(status_dir: Path) -> list[Ending]:
    """The latest end of each worker that has ended at least once, by rank."""
    found = [(_worker(file), json.loads(file.read_text(encoding="utf-8"))) for file in status_dir.glob("worker-*.json")]
    return sorted((Ending(worker=worker, **fields) for worker, fields in found), key=lambda ending: ending.worker)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The process group of a running worker, and its keeper; `asked`: the keeper was asked to end it."""

    worker: int
    leader: int
    keeper: int
    asked: bool


def read_groups(status_dir: Path) -> list[Group]:
    """The groups of workers that run, or whose keepers were killed."""
    groups = []
    for file in status_dir.glob("group-*"):
        with suppress(OSError, ValueError):  # The worker has ended, or is just being started.
            leader, keeper, *asked = file.read_text().split()
            groups.append(Group(worker=_worker(file), leader=int(leader), keeper=int(keeper), asked=bool(asked)))
    return groups


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process. A debugger does the same, but the system tells them apart."""
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _worker(file: Path) -> int:
    return int(file.stem.partition("-")[2])
