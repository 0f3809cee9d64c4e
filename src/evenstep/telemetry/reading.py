"""Reads event files without trusting them: memory is bounded, reads never block, and every value is checked.

All code that reads a run directory uses this module.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, Union, final

import msgspec

from evenstep.core.errors import ConfigError
from evenstep.telemetry.events import RECORDS, SCHEMA, Event, Run
from evenstep.telemetry.regular import open_regular

_LINE_BYTES: Final = 16 << 20
"""The longest line; a run of 100,000 workers needs a tenth of that."""

Role: TypeAlias = Literal["worker", "server", "launcher"]
"""The writer of a file of events, which is named after it."""
ROLES: Final[tuple[Role, ...]] = ("worker", "server", "launcher")
"""All roles."""


_DECODER: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder(Union[tuple(RECORDS.values())])  # noqa: UP007 - made here
_CONTROL: Final = re.compile(rb"(\\\\)|\\(?:[bfr]|u00(?:0[^9aA]|1.|7[fF]|[89].))|\x7f|\xc2[\x80-\x9f]")
"""Control characters in JSON except tabs and new lines; the group matches backslashes that do not begin a code."""
_MISSING: Final = re.compile("Object missing required field `(?!event`)(.*?)`$")


def event_of(line: bytes) -> Event | None:
    """Decode the event in a line; None for a kind unknown to this version.

    Control characters in its texts, with which it could command a terminal, are replaced by their codes.

    Raises:
        ValueError: The line is damaged, or of another version; the message is the end of a sentence about the line.
    """
    if len(line) >= _LINE_BYTES:
        raise ValueError(f"is not an event (it is longer than {_LINE_BYTES >> 20} MB): delete it")
    try:
        event: Event = _DECODER.decode(_printable(line))
    except (ValueError, RecursionError) as error:
        with suppress(KeyError, RecursionError, TypeError, ValueError):
            kind = msgspec.json.decode(line)["event"]
            if isinstance(kind, str) and kind not in RECORDS:
                return None
        missing = _MISSING.match(str(error))
        if missing is not None:
            raise ValueError(
                f"has no {missing[1]!r}: it was written by another version of evenstep, use that one"
            ) from error
        raise ValueError(f"is not an event ({error}): delete it or fix it") from error
    if isinstance(event, Run) and event.schema > SCHEMA:
        raise ValueError(
            f"is of schema {event.schema}, and this version of evenstep knows those up to {SCHEMA}: use a newer one"
        )
    return event


def _printable(lines: bytes) -> bytes:
    if b"\\" in lines or b"\x7f" in lines or not lines.isascii():
        return _CONTROL.sub(_as_code, lines)
    return lines


def _as_code(found: re.Match[bytes]) -> bytes:
    if found[1]:
        return found[0]
    return b"\\" + found[0] if found[0].startswith(b"\\") else b"?"


def events_of(lines: bytes, damaged: Callable[[int, ValueError], None]) -> list[Event]:
    """Decode all events in whole lines, as `event_of` does; `damaged` gets the index of a line without, and why."""
    with suppress(ValueError, RecursionError):
        events: list[Event] = _DECODER.decode_lines(_printable(lines))
        if len(lines) < _LINE_BYTES and not any(isinstance(each, Run) and each.schema > SCHEMA for each in events):
            return events
    found = []
    for index, line in enumerate(lines.splitlines()):
        try:
            found.append(event_of(line) if line else None)
        except ValueError as error:
            damaged(index, error)
    return [event for event in found if event is not None]


def whole_lines(path: Path, offset: int = 0) -> Iterator[bytes]:
    """The complete lines of a file from an offset on, many at once; not an incomplete last line, which a kill has cut.

    A line of more than 16 MB is split into pieces of about that length, which `event_of` refuses.

    Raises:
        ConfigError: The file is not a regular file, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            file.seek(offset)
            while lines := file.read(1 << 17) + file.readline(_LINE_BYTES):  # Hundreds of events.
                whole = len(lines) if len(lines) >= _LINE_BYTES else lines.rfind(b"\n") + 1
                yield lines[:whole]
                if whole < len(lines):
                    return
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): delete it, or let it be read") from error


def event_files(run_dir: Path, role: Role) -> list[Path]:
    """The existing event files of a role, by the writers' numbers."""
    if not os.path.isdir(run_dir):  # `glob` raises an error if the name is too long.
        return []
    if role == "launcher":
        return list(run_dir.glob("launcher.jsonl"))
    numbered = ((path.stem.partition("-")[2], path) for path in run_dir.glob(f"{role}-*.jsonl"))
    return [path for _, path in sorted((int(number), path) for number, path in numbered if number.isdecimal())]


def read_events(run_dir: Path, *, kind: type[Event] | None = None, role: Role = "worker") -> Iterator[Event]:
    """All events of a run directory, one writer after the other, each writer's in order.

    Args:
        run_dir: The directory.
        kind: Only events of this kind.
        role: The writers. A run without servers or launcher has none of their events.

    Raises:
        ConfigError: The directory has no events of workers, or a line is damaged (a last line cut by a kill is not).
    """
    files = event_files(run_dir, role)
    if not files and role == "worker":
        raise ConfigError(f"{run_dir} holds no worker-*.jsonl: give the --run-dir of a run")
    for path in files:
        number = 1
        for lines in whole_lines(path):
            for event in events_of(lines, partial(_refuse, path, number)):
                if kind is None or isinstance(event, kind):
                    yield event
            number += lines.count(b"\n")


def _refuse(path: Path, first: int, index: int, error: ValueError) -> None:
    raise ConfigError(f"{path} line {first + index} {error}") from error


@final
class RunTail:
    """Follows all files of a run directory, including those created later; an incomplete last line waits.

    Damaged lines are skipped; `read_events` reports them.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._offsets: dict[Path, int] = {}

    def new(self) -> Iterator[Event]:
        """The events since the last call, one file after the other; errors as for `new_in`."""
        for role in ROLES:
            for path in event_files(self._run_dir, role):
                yield from self.new_in(path)

    def new_in(self, path: Path) -> Iterator[Event]:
        """The events in one of the files since the last call.

        Raises:
            ConfigError: The file is not a regular file, or cannot be read.
        """
        for lines in whole_lines(path, self._offsets.get(path, 0)):
            self._offsets[path] = self._offsets.get(path, 0) + len(lines)
            yield from events_of(lines, lambda index, error: None)
