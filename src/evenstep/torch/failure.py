"""Records an exception that ends this process, names it, and tells the other workers."""

import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from os import environ
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar, final
from weakref import WeakKeyDictionary

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.launch.c10d import of_communication, of_data_worker
from evenstep.telemetry import read_events
from evenstep.telemetry.events import Failed, RanOutOfMemory
from evenstep.torch.processes.liveness import Liveness
from evenstep.worker.hold import EmulatedOutOfMemoryError
from evenstep.worker.tracker import Tracker

_MAX_LETTERS: Final = 300

Owner = TypeVar("Owner")
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_alive: WeakKeyDictionary[Any, Callable[[Any, BaseException], BaseException]] = WeakKeyDictionary()


def when_failing(owner: Owner, act: Callable[[Owner, BaseException], BaseException]) -> None:
    """Call `act(owner, error)` before an exception ends this process, if the owner is still alive.

    The error that it returns is shown instead. `act` must not refer to the owner.
    """
    install_hook()
    _alive[owner] = act


def install_hook() -> None:
    """Make exceptions that end this process pass through here. May be called repeatedly."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


@final
class _Hook:
    """Calls the functions registered by `when_failing`, then the previous hook.

    If another library has put its hook on top, there may be a second _Hook below that one: it only passes on.
    """

    _telling = False

    def __init__(self, before: ExceptHook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if _Hook._telling:
            self._before(kind, error, traceback)
            return
        _Hook._telling = True
        try:
            shown = error
            for owner, act in list(_alive.items()):
                shown = act(owner, shown)
            if "TORCHELASTIC_ERROR_FILE" in environ and isinstance(shown, EvenstepError):
                get_error_handler().record_exception(shown)  # The launcher repeats it.
            self._before(type(shown), shown, traceback)
        finally:
            _Hook._telling = False


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """Called with an error that ends this process before the run is over: records it, names it, tells the others.

    `device` identifies this worker's device, and `advice` says what to do if its memory was too small. `liveness`, if
    there are other workers, tells them.
    """

    device: str
    advice: str
    liveness: Liveness | None

    def __call__(self, tracker: Tracker, error: BaseException) -> BaseException:
        if tracker.summary is not None:
            tracker.summary.drop()
        if tracker.closed:
            return error
        error = self._named(tracker, error)
        now, kind, text = tracker.iteration, type(error).__name__, str(error).strip().partition("\n")[0]
        text = text if len(text) <= _MAX_LETTERS else text[: _MAX_LETTERS - 3] + "..."
        with suppress(OSError):  # A full disk must not hide the error.
            tracker.recorder.record(
                Failed(
                    worker=tracker.workers.rank,
                    iteration=-1 if now is None else now.number,
                    at=time.perf_counter(),
                    type=kind,
                    text=text,
                )
            )
        if self.liveness is not None:
            said = ": ".join(filter(None, (kind, text)))
            self.liveness.tell(f"worker {self.liveness.rank} ended with {said}: look at its output, then start again")
        return error

    def _named(self, tracker: Tracker, error: BaseException) -> BaseException:
        """Name an error of communication, of a data worker, or of memory during compute; return others unchanged."""
        if (
            self.liveness is not None
            and isinstance(error, RuntimeError)
            and (of_communication(error) or of_data_worker(error))
        ):
            return _caused(self.liveness.lost(error), error)
        now = tracker.iteration
        memory = isinstance(error, torch.OutOfMemoryError | EmulatedOutOfMemoryError)
        if now is None or now.paused is not None or not memory:
            return error
        size, load = len(now.piece.positions), math.ceil(now.amounts[-1])
        tracker.recorder.record(
            RanOutOfMemory(
                worker=tracker.workers.rank,
                iteration=now.number,
                at=time.perf_counter(),
                device=self.device,
                samples=load,
                largest_run=0 if tracker.meter.memory is None else tracker.meter.memory.largest_run,
            )
        )
        cost = "" if now.costs is None else f" that cost as much as {load} average ones"
        named = OutOfMemoryError(
            f"worker {tracker.workers.rank} ran out of memory with a batch of {size} samples{cost}: {self.advice}"
        )
        return _caused(named, error)


def _caused(error: EvenstepError, cause: BaseException) -> EvenstepError:
    error.__cause__ = cause
    return error


@final
class OutOfMemoryError(EvenstepError, MemoryError):
    """A worker's device could not hold its batch; the message names the worker, the batch and what to do."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The smallest batch that a device could not hold, and the largest smaller one that ran; 0 if none did."""

    samples: int
    largest_run: int


def read_failure(run_dir: Path, device: str) -> Failure | None:
    """The failure of this device in earlier runs with this folder; None if there was none."""
    try:
        events = list(read_events(run_dir, kind=RanOutOfMemory))
    except ConfigError:
        return None  # A new folder, or a damaged one, which is reported elsewhere.
    mine = [event for event in events if isinstance(event, RanOutOfMemory) and event.device == device]
    if not mine:
        return None
    failed = min(event.samples for event in mine)
    ran = (event.largest_run for event in mine if event.largest_run < failed)
    return Failure(samples=failed, largest_run=max(ran, default=0))
