"""Where events go: a file of JSON lines per worker or server, Python's logging, or nowhere."""

import json
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final, Literal, Protocol, final

import msgspec

from evenstep.core.errors import ConfigError
from evenstep.telemetry.events import Disturbed, Event, Failed, Planned, RanOutOfMemory, Run

_BLOCK_BYTES: Final = 65536


class Recorder(Protocol):
    """Takes the events of one writer."""

    def record(self, event: Event) -> None:
        """Keep one event."""

    def close(self) -> None:
        """No more events follow."""


@final
class Silent:
    """Keeps nothing."""

    def takes(self, kind: type[Event]) -> bool:
        """No."""
        return False

    def record(self, event: Event) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@final
class JsonlRecorder:
    """Appends one line per event to `RUN_DIR/worker-RANK.jsonl` or `RUN_DIR/server-INDEX.jsonl`.

    `last` makes an event that is written when the recorder is closed, or when its process ends without being killed. If
    a write fails later, on a full disk for example, it warns once and keeps nothing more: the run goes on.

    Raises:
        ConfigError: The run directory cannot be written.
    """

    def __init__(
        self,
        run_dir: Path,
        index: int,
        *,
        role: Literal["worker", "server"] = "worker",
        last: Callable[[], Event] | None = None,
    ) -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            path = run_dir / f"{role}-{index}.jsonl"
            _cut_incomplete_line(path)
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(
                f"the run directory {run_dir} cannot be written ({error.strerror}): give another"
            ) from error
        self._lost = False
        # A training script has no place where it would close what `prepare` opened.
        self._finish = weakref.finalize(self, _finish, self._file, last, os.getpid())

    def takes(self, kind: type[Event]) -> bool:
        """All, until a write has failed."""
        return not self._lost

    def record(self, event: Event) -> None:
        """Append the event."""
        if self._lost:
            return
        try:
            _write(self._file, event)
        except OSError as error:
            self._lost = True
            self._finish.detach()
            with suppress(OSError):  # The buffered rest cannot be written either.
                self._file.close()
            warnings.warn(
                f"{self._file.name} cannot be written any more ({error.strerror}), so the run goes on without a record:"
                " make room, or give another run directory next time",
                stacklevel=2,
            )

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._finish()


_encode: Final = msgspec.json.Encoder().encode


def line_of(event: Event) -> bytes:
    """The line of an event in a file."""
    try:
        return _encode(event) + b"\n"
    except UnicodeEncodeError:  # A text that is no Unicode, such as a file name in an error's message.
        return json.dumps(msgspec.to_builtins(event), ensure_ascii=False).encode(errors="replace") + b"\n"


def _write(file: BinaryIO, event: Event) -> None:
    file.write(line_of(event))
    file.flush()  # A killed worker leaves complete lines.


def _finish(file: BinaryIO, last: Callable[[], Event] | None, process: int) -> None:
    # A fork of the process (a data worker) inherits this finalizer, but its end is not the worker's.
    if last is not None and os.getpid() == process:
        with suppress(OSError):
            _write(file, last())
    with suppress(OSError):  # A full disk: what is written are complete lines.
        file.close()


def _cut_incomplete_line(path: Path) -> None:
    """Remove a last line that a kill has cut, since a restarted worker would append to it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)


_LEVELS: Final[Mapping[type[Event], int]] = {
    Run: logging.INFO,
    Planned: logging.DEBUG,
    RanOutOfMemory: logging.WARNING,
    Disturbed: logging.INFO,
    Failed: logging.ERROR,
}


@final
class Logged:
    """Passes every event on, and logs the few that matter to the logger `evenstep`.

    INFO: a worker starts, or is slowed on purpose. DEBUG: sizes change. WARNING: a device runs out
    of memory. ERROR: an exception ends the script. A script sees them by `logging.basicConfig(level=logging.INFO)`.
    """

    def __init__(self, recorder: JsonlRecorder | Silent, worker: int) -> None:
        self._recorder = recorder
        self._logger = logging.getLogger("evenstep")
        self._worker = worker

    def takes(self, kind: type[Event]) -> bool:
        """Whether events of this kind are kept or shown; others need not be made."""
        return self._recorder.takes(kind) or (kind in _LEVELS and self._logger.isEnabledFor(_LEVELS[kind]))

    def record(self, event: Event) -> None:
        """Keep one event."""
        self._recorder.record(event)
        match event:
            case Run():
                workers = f"{event.workers} workers, global batch {event.global_batch_size}"
                self._log(event, f"{event.scheme} with {workers}")
            case Planned():
                self._log(event, f"sizes from iteration {event.iteration}: {event.batch_sizes}")
            case RanOutOfMemory():
                self._log(event, f"out of memory with a batch of {event.samples} samples")
            case Disturbed():
                slower = f"{event.factor:g} times its seconds and {event.extra_seconds:g} s more"
                self._log(event, f"emulated slowness from iteration {event.iteration}: {slower}")
            case Failed():
                self._log(event, f"failed: {event.type}: {event.text}")

    def _log(self, event: Event, text: str) -> None:
        self._logger.log(_LEVELS[type(event)], "worker %d: %s", self._worker, text)

    def close(self) -> None:
        """No more events follow."""
        self._recorder.close()
