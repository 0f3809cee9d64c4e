"""Watches over the workers of `evenstep run`: tells the terminal what happens to them, and ends those that hang."""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, final

from evenstep.core.supervision import Action, End, Ending, Leave, Restarts, Say, Stop, Supervision, Why
from evenstep.launch.endings import WorkerEnd, read_ends
from evenstep.telemetry.say import say

POLL_SECONDS: Final = 0.2
"""How often to look how workers have ended."""
END_SECONDS: Final = 5.0
"""How long a worker that is to end may take."""


class Follows(Protocol):
    """Follows the workers of one run, and says what is to be done."""

    def ended(self, end: WorkerEnd, now: float) -> list[Action]:
        """A worker's process has ended."""

    def told(self, event: Mapping[str, Any], now: float) -> list[Action]:
        """Shard 0 told that a worker has come or gone."""

    def look(self, now: float, *, last: bool) -> list[Action]:
        """Time has passed; `last`: all workers have ended."""


@final
class FollowsServers:
    """Follows workers of a run on servers, whose keepers start them again; `record` is given how one failed."""

    def __init__(self, supervision: Supervision, record: Callable[[Mapping[str, object]], None] | None = None) -> None:
        self.supervision = supervision
        self._record = record

    def ended(self, end: WorkerEnd, now: float) -> list[Action]:
        if end.asked_to_end:
            return []
        if end.failed and self._record is not None:
            self._record({"event": "worker_failed", "worker": end.worker, "how": end.how})
        return self.supervision.ended(_ending(end, end.restarts + 1 if end.again else 0))

    def told(self, event: Mapping[str, Any], now: float) -> list[Action]:
        if event["event"] == "join":
            return self.supervision.joined(event["worker"], event["limit_seconds"])
        if event["event"] == "meet":
            return self.supervision.met(event["worker"])
        if event["event"] == "missing":
            return self.supervision.missing(event["worker"])
        return self.supervision.left(_leave(event), now)

    def look(self, now: float, *, last: bool) -> list[Action]:
        return self.supervision.look(now, last=last)


@final
class FollowsAgent:
    """Follows workers that torchrun's agent starts again, all of them at once."""

    def __init__(self, restarts: int, workers: int) -> None:
        self._limit = restarts
        self._restarts = Restarts(restarts, workers)

    def ended(self, end: WorkerEnd, now: float) -> list[Action]:
        again = end.restarts + 1 if end.restarts < self._limit else 0
        if not end.asked_to_end:
            self._restarts.ended(_ending(end, again), now)
        return []

    def told(self, event: Mapping[str, Any], now: float) -> list[Action]:
        return []

    def look(self, now: float, *, last: bool) -> list[Action]:
        return [*self._restarts.look(now, last=last)]


@final
class Watch:
    """Watches the workers while they run: in a thread if used as a context manager, else whenever `look` is called.

    Args:
        status_dir: Where keepers write down how workers end; None where there are no keepers.
        follows: Decides what is to be done.
        say: Tells the user a sentence.
        end_seconds: How long a worker that is to end may take.

    Attributes:
        stopped: Why the run was ended, if it was.
        to_end: The workers that are to end.
    """

    def __init__(
        self,
        status_dir: Path | None,
        follows: Follows,
        *,
        say: Callable[[str], None] = say,
        end_seconds: float = END_SECONDS,
    ) -> None:
        self._status_dir = status_dir
        self._follows = follows
        self._say = say
        self._end_seconds = end_seconds
        self._known: dict[int, float] = {}
        """When the end of each worker was that is known, by the clock of its keeper."""
        self.to_end: set[int] = set()
        self._asked: dict[Path, float] = {}
        """Groups that were asked to end, and when."""
        self.stopped: str | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="evenstep-watch")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()
        self.look(last=True)

    def told(self, event: Mapping[str, object]) -> None:
        """Shard 0 told that a worker has come or gone; from any thread."""
        with self._lock:
            self._act(self._follows.told(event, time.monotonic()))

    def was_asked(self, worker: int) -> bool:
        """Whether this worker was asked to end."""
        return any(group.name == f"group-{worker}" for group in self._asked)

    def look(self, *, last: bool = False) -> None:
        """See what has happened meanwhile; `last`: all workers have ended."""
        now = time.monotonic()
        with self._lock:
            if self._status_dir is not None:
                self._look_at_ends(self._status_dir, now)
            self._act(self._follows.look(now, last=last))
            if self._status_dir is not None:
                self._see_ended(self._status_dir, now)

    def _watch(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            self.look()

    def _look_at_ends(self, status_dir: Path, now: float) -> None:
        for end in read_ends(status_dir):
            if self._known.get(end.worker) != end.at_seconds:
                self._known[end.worker] = end.at_seconds
                self._act(self._follows.ended(end, now))

    def _see_ended(self, status_dir: Path, now: float) -> None:
        """See to it that workers end that are to."""
        for group in status_dir.glob("group-*"):
            if self.stopped is not None or int(group.name.partition("-")[2]) in self.to_end:
                self._end(group, now)

    def _end(self, group: Path, now: float) -> None:
        """Have the keeper end its worker, which it does not start again then; kill it where that does not help."""
        worker, keeper = read_group(group)
        if not keeper:
            return
        with suppress(ProcessLookupError, PermissionError):
            if group not in self._asked:
                self._asked[group] = now
                os.kill(keeper, signal.SIGTERM)
            elif now - self._asked[group] > self._end_seconds:
                os.killpg(worker, signal.SIGKILL)

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Say):
                self._say(action.text)
            elif isinstance(action, End):
                self.to_end.add(action.worker)
            elif isinstance(action, Stop):
                self.stopped = action.why


def read_group(file: Path) -> tuple[int, int]:
    """The process group of a worker and the process of its keeper; zeros where there are none any more."""
    try:
        worker, keeper, *_ = file.read_text().split()
    except (OSError, ValueError):  # It has ended, or is just being started.
        return 0, 0
    return int(worker), int(keeper)


def was_asked(file: Path) -> bool:
    """Whether the keeper that left this file behind had been asked to end."""
    with suppress(OSError):
        return file.read_text().endswith("asked")
    return False


def _ending(end: WorkerEnd, restart: int) -> Ending:
    return Ending(
        worker=end.worker,
        how=end.how,
        failed=end.failed,
        restart=restart if end.failed else 0,
        missed_another=end.missed_another,
    )


def _leave(event: Mapping[str, Any]) -> Leave:
    return Leave(
        worker=event["worker"],
        why=Why(event["why"]),
        seconds=event["seconds"],
        in_loop=event["in_loop"],
        doing=event["doing"],
    )
