"""Follows the events of a run while it goes on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, final

from evenstep.telemetry.reading import event_of, whole_lines
from evenstep.telemetry.recorder import Role, event_files

_ROLES: Final[tuple[Role, ...]] = ("worker", "server", "launcher")


@final
class Tail:
    """The events that have come into a file since the last look; a line that is not whole yet waits for the next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """What has come; a damaged line, which `read_events` would name, is passed over.

        Raises:
            ConfigError: The file is no regular file, or cannot be read.
        """
        if not self._path.exists():
            return
        for line in whole_lines(self._path, self._offset):
            self._offset += len(line)
            try:
                event = event_of(line)
            except ValueError:
                continue
            yield event


@final
class RunTail:
    """The same for all files of a run directory, those that come later too."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._tails: dict[Path, tuple[Role, Tail]] = {}

    def new(self) -> Iterator[tuple[Role, dict[str, Any]]]:
        """Everything that has come since the last look, one file after the other, with whose it is."""
        for role in _ROLES:
            for path in event_files(self._run_dir, role):
                self._tails.setdefault(path, (role, Tail(path)))
        for role, tail in self._tails.values():
            for event in tail.new():
                yield role, event
