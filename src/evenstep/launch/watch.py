"""Watches the workers of a run: reports what happens to them, and ends those that hang."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self, final

import msgspec
import psutil

from evenstep.core.ending import Ending
from evenstep.core.supervision import Supervision
from evenstep.launch.supervisor import END_SECONDS, Supervisor
from evenstep.telemetry.events import WorkerFailed
from evenstep.telemetry.say import say

POLL_SECONDS: Final = 0.2
"""How often to check how workers have ended."""


@final
class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """What the keeper of a worker has written down.

    Attributes:
        worker: Its rank.
        keeper: The keeper's process.
        processes: The worker's processes, of which the first leads their process group; empty unless it runs, or its
            keeper was killed.
        asked: Whether the keeper was asked to end it.
        end: How it ended last, also under the keepers before this one; None if it never has.
    """

    worker: int
    keeper: int
    processes: tuple[int, ...] = ()
    asked: bool = False
    end: Ending | None = None


@final
class Watch:
    """Watches the workers under keepers while they run, in a thread.

    Args:
        status_dir: Where keepers write down how workers end.
        supervision: Decides what to report and do.
        record: Receives a record of each failure of a worker.
        say: Reports a sentence to the user.
        end_seconds: How long a worker that is to end may take.
        marks: The folder in which each worker that calls `prepare` leaves a file, if they do not find out themselves
            who keeps them waiting.
    """

    def __init__(
        self,
        status_dir: Path,
        supervision: Supervision,
        *,
        record: Callable[[WorkerFailed], None] = lambda event: None,
        say: Callable[[str], None] = say,
        end_seconds: float = END_SECONDS,
        marks: Path | None = None,
    ) -> None:
        self._status_dir = status_dir
        self._supervision = supervision
        self._record = record
        self._say = say
        self._end_seconds = end_seconds
        self._marks = marks
        self._known: dict[int, float] = {}
        """Time of the latest known end of each worker, by the clock of its keeper."""
        self._ending: dict[int, Supervisor] = {}
        """The workers that were asked to end."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="evenstep-watch")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()
        self._look(last=True)

    def told(self, event: Mapping[str, object]) -> None:
        """Shard 0 reports that a worker has come or gone; from any thread."""
        with self._lock:
            self._supervision.told(event)
            self._act()

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            self._look()

    def _look(self, *, last: bool = False) -> None:
        """Report and do what is due; `last`: all workers have ended."""
        with self._lock:
            kept = read_kept(self._status_dir)
            self._look_at_ends([each.end for each in kept if each.end is not None])
            running = [each for each in kept if each.processes]
            if self._marks is not None:
                self._look_at_processes(running, self._marks)
            self._act(last=last)
            # Their keepers end those that are to end, and then do not restart them.
            for each in running:
                if self._supervision.stopped is not None or each.worker in self._supervision.to_end:
                    supervisor = self._ending.setdefault(each.worker, Supervisor(each.keeper, -each.processes[0]))
                    supervisor.end(self._end_seconds)

    def _look_at_ends(self, ends: Sequence[Ending]) -> None:
        for ending in ends:
            if self._known.get(ending.worker) == ending.at_seconds:
                continue
            self._known[ending.worker] = ending.at_seconds
            self._ending.pop(ending.worker, None)  # If it is started again, then as another process.
            if self._marks is not None and ending.failed:
                for name in (str(ending.worker), f"{ending.worker}.state"):
                    (self._marks / name).unlink(missing_ok=True)
            if ending.failed and not ending.asked_to_end:
                self._record(WorkerFailed(worker=ending.worker, how=ending.how))
            self._supervision.ended(ending)

    def _look_at_processes(self, running: Sequence[Kept], marks: Path) -> None:
        halted = [each.worker for each in running if any(map(is_stopped, each.processes))]
        came = [int(file.name) for file in marks.iterdir() if file.name.isdecimal()]
        since: dict[str, dict[int, float]] = {"": {}, "waiting": {}, "computing": {}}  # Empty as it is written.
        for file in marks.glob("*.state"):
            since[file.read_text(encoding="utf-8")][int(file.stem)] = time.time() - file.stat().st_mtime
        del since[""]
        self._supervision.processes(running=[each.worker for each in running], halted=halted, came=came, **since)

    def _act(self, *, last: bool = False) -> None:
        for text in self._supervision.look(time.monotonic(), last=last):
            self._say(text)


def read_kept(status_dir: Path) -> list[Kept]:
    """Return what all keepers have written down, by rank."""
    found = [msgspec.json.decode(file.read_bytes(), type=Kept) for file in status_dir.glob("worker-*.json")]
    return sorted(found, key=lambda each: each.worker)


def read_endings(status_dir: Path) -> list[Ending]:
    """Return the latest end of each worker that has ended at least once, by rank."""
    return [each.end for each in read_kept(status_dir) if each.end is not None]


def is_stopped(pid: int) -> bool:
    """True if a signal has stopped the process. A debugger does the same, but the system tells them apart."""
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False
