"""Where events go: a file of JSON lines per worker, or nowhere."""

import json
import os
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TextIO, TypeAlias, final

from evenstep.core.errors import ConfigError
from evenstep.telemetry.reading import event_of, whole_lines

_BLOCK: Final = 65536
_TOLD_BYTES: Final = 1 << 20


class Recorder(Protocol):
    """Takes one worker's events; an event is a mapping with the key `event` that JSON can hold."""

    def record(self, event: Mapping[str, object]) -> None:
        """Keep one event."""

    def close(self) -> None:
        """Nothing more will come."""


@final
class Silent:
    """Keeps nothing."""

    def record(self, event: Mapping[str, object]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@final
class JsonlRecorder:
    """Appends one line per event, with its writer, to `RUN_DIR/worker-RANK.jsonl` or `RUN_DIR/server-INDEX.jsonl`.

    `last` makes an event that is written when this is closed, or its process ends without having been killed.
    Where the disk is full later on, it warns once and keeps nothing more: training is worth more than its record.

    Raises:
        ConfigError: The run directory cannot be written.
    """

    def __init__(
        self,
        run_dir: Path,
        index: int,
        *,
        role: Literal["worker", "server"] = "worker",
        last: Callable[[], Mapping[str, object]] | None = None,
    ) -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            path = run_dir / f"{role}-{index}.jsonl"
            _cut_torn_line(path)
            # Line-buffered, so that a killed worker leaves whole lines behind.
            self._file = path.open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"the run directory {run_dir} cannot be written ({error.strerror}): give another"
            ) from error

        self._writer: dict[str, object] = {role: index}
        self._lost = False
        # A training script has no place where it would close what `prepare` opened.
        self._finish = weakref.finalize(self, _finish, self._file, self._writer, last, os.getpid())

    def record(self, event: Mapping[str, object]) -> None:
        """Append the event."""
        if self._lost:
            return
        try:
            self._file.write(_line({**self._writer, **event}))
        except OSError as error:
            self._lost = True
            self._finish.detach()
            with suppress(OSError):  # What it still holds cannot be written either.
                self._file.close()
            warnings.warn(
                f"{self._file.name} cannot be written any more ({error.strerror}), so the run goes on without a record:"
                " make room, or give another run directory next time",
                stacklevel=2,
            )

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._finish()


def _line(event: Mapping[str, object]) -> str:
    return json.dumps(event, separators=(",", ":")) + "\n"


def _finish(
    file: TextIO, writer: Mapping[str, object], last: Callable[[], Mapping[str, object]] | None, process: int
) -> None:
    # A fork of the process (a data worker) has all of this too, and its end is not the worker's.
    if last is not None and os.getpid() == process:
        with suppress(OSError):
            file.write(_line({**writer, **last()}))
    with suppress(OSError):  # A full disk: what is written is whole lines already.
        file.close()


def _cut_torn_line(path: Path) -> None:
    """Take away a last line that a kill has torn: a worker that starts again would go on in the middle of it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - _BLOCK)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            if newline >= 0:
                file.truncate(begin + newline + 1)
                return
            end = begin
        file.truncate(0)


Role: TypeAlias = Literal["worker", "server", "launcher"]


def read_events(
    run_dir: Path,
    *,
    kinds: Collection[str] | None = None,
    role: Role = "worker",
    progress: Callable[[int], None] | None = None,
) -> Iterator[dict[str, Any]]:
    """All events of a run directory, worker after worker, each worker's in the order in which they happened.

    Args:
        run_dir: The directory.
        kinds: Only events of these kinds; much faster where they are rare.
        role: `server`: those of the servers instead, one server after another; none where the run had no servers.
            `launcher`: what the launcher wrote down about servers that ended.

        progress: Told now and then how many bytes more have been read.

    Raises:
        ConfigError: The folder holds no worker's events, or a line is damaged (a last line torn by a kill is not).
    """
    files = event_files(run_dir, role)
    if not files and role == "worker":
        raise ConfigError(f"{run_dir} holds no worker-*.jsonl: give the --run-dir of a run")
    for path in files:
        for number, line in enumerate(_told(whole_lines(path), progress), start=1):
            if kinds is not None and not any(b'"event":"%b"' % kind.encode() in line for kind in kinds):
                continue
            try:
                yield event_of(line)
            except ValueError as error:
                raise ConfigError(f"{path} line {number} is no event ({error}): delete or mend it") from error


def _told(lines: Iterable[bytes], progress: Callable[[int], None] | None) -> Iterator[bytes]:
    """The lines; `progress` is told of about a megabyte of them at a time."""
    read = 0
    for line in lines:
        yield line
        read += len(line)
        if progress is not None and read >= _TOLD_BYTES:
            progress(read)
            read = 0
    if progress is not None:
        progress(read)


def event_files(run_dir: Path, role: Role) -> list[Path]:
    """The files with the events of this role that are there, in the order of their writers' numbers."""
    if role == "launcher":
        return list(run_dir.glob("launcher.jsonl"))
    numbered = ((path.stem.partition("-")[2], path) for path in run_dir.glob(f"{role}-*.jsonl"))
    return [path for _, path in sorted((int(number), path) for number, path in numbered if number.isdecimal())]
