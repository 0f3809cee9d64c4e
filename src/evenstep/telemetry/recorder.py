"""Recorders of events: a file of JSON lines per worker or server, or nowhere."""

import json
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from mmap import mmap
from pathlib import Path
from typing import BinaryIO, Final, Literal, Protocol, final

import msgspec

from evenstep.core.errors import ConfigError
from evenstep.telemetry.events import Event


class Recorder(Protocol):
    """Takes the events of one writer."""

    def record(self, event: Event) -> None:
        """Keep one event."""

    def close(self) -> None:
        """No more events follow."""


@final
class Silent:
    """Keeps nothing."""

    def record(self, event: Event) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@contextmanager
def writing_to(run_dir: Path) -> Iterator[None]:
    """Make a run directory if it does not exist, for the block to write into; ConfigError if one of both fails."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError(f"the run directory {run_dir} cannot be written ({error.strerror}): give another") from error


@final
class JsonlRecorder:
    """Appends one line per event to `RUN_DIR/worker-RANK.jsonl` or `RUN_DIR/server-INDEX.jsonl`.

    `last` makes an event that is written when the recorder is closed, or when its process ends without being killed. If
    a write fails later, for example on a full disk, it warns once and writes nothing more, and the run goes on.

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
        with writing_to(run_dir):
            path = run_dir / f"{role}-{index}.jsonl"
            # A last line cut by a kill goes, because a restarted worker would append to it.
            if path.exists() and path.stat().st_size:  # An empty file cannot be mapped.
                with path.open("rb+") as file:
                    with mmap(file.fileno(), 0) as content:
                        end = content.rfind(b"\n") + 1
                    file.truncate(end)
            self._file = path.open("ab")
        self._lost = False
        # Training scripts do not close what `prepare` opened.
        self._finish = weakref.finalize(self, _finish, self._file, last, os.getpid())

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
    except UnicodeEncodeError:  # A text that is not valid Unicode, such as a file name in an error's message.
        return json.dumps(msgspec.to_builtins(event), ensure_ascii=False).encode(errors="replace") + b"\n"


def _write(file: BinaryIO, event: Event) -> None:
    file.write(line_of(event))
    file.flush()  # So that a killed worker leaves complete lines.


def _finish(file: BinaryIO, last: Callable[[], Event] | None, process: int) -> None:
    # A forked process (a data worker) inherits this finalizer, but its end is not the worker's.
    if last is not None and os.getpid() == process:
        with suppress(OSError):
            _write(file, last())
    with suppress(OSError):  # On a full disk; the written lines are complete.
        file.close()
