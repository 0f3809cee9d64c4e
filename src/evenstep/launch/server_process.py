"""One server process, and its output."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from subprocess import PIPE
from typing import final
from urllib.parse import urlsplit

from evenstep.core.ending import how_it_ended
from evenstep.launch.supervisor import Supervisor


@final
class ServerProcess:
    """One server process, and its output.

    Attributes:
        addresses: Where it listens; empty until it does.
        beats: Whether it has sent a heartbeat, which it repeats from then on.
    """

    def __init__(self, index: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.index = index
        self.addresses: tuple[str, ...] = ()
        self.beats = False
        self._unfinished = b""
        self.process = Supervisor.start(command, stdin=PIPE, stdout=PIPE, bufsize=0, env=environment)
        assert self.process.child.stdin is not None
        assert self.process.child.stdout is not None
        self._input, self.output = self.process.child.stdin, self.process.child.stdout

    @property
    def port(self) -> int:
        """The port that it listens on; 0 if none."""
        ports = [urlsplit(address).port for address in self.addresses if address.startswith("tcp://")]
        return next(filter(None, ports), 0)

    @property
    def how_it_ended(self) -> str:
        """Return how it ended: the rest of a sentence that begins with the server."""
        return how_it_ended(self.process.child.wait())

    def read(self) -> list[Mapping[str, object]] | None:
        """Return the events since the last call, when `output` is readable; None if the server is gone.

        A server whose first line makes no sense is killed.
        """
        piece = os.read(self.output.fileno(), 65536)
        *lines, self._unfinished = (self._unfinished + piece).split(b"\n")
        if lines and not self.addresses:
            try:
                self.addresses = tuple(map(str, json.loads(lines.pop(0))["addresses"]))
            except (ValueError, KeyError, TypeError):
                piece = b""
        if not piece:
            if not self.process.ended_within(5.0):
                self.process.kill()
            return None
        self.beats = self.beats or b"" in lines
        events = []
        for line in lines:
            with suppress(ValueError):  # Anything in the server's process may print lines that are not events.
                events.append(json.loads(line))
        return [event for event in events if isinstance(event, dict)]

    def ask_for_present(self) -> None:
        """Have the server report an event `present`, which says whether any worker is there."""
        with suppress(OSError, ValueError):  # It has ended, or is to end.
            self._input.write(b"\n")

    def ask_to_end(self, seconds: float) -> None:
        """Have the server write its last snapshot and end."""
        self.process.end(seconds)
        self._input.close()

    def let_go(self) -> None:
        """Close the pipes, which tells the server that it is no longer supervised."""
        self._input.close()
        self.output.close()

    def kill(self) -> None:
        """End the server at once; calling this twice is harmless."""
        if self.process.exit_code is None:
            self.process.kill()
        self.let_go()
