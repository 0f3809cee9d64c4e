"""The Trace Event Format of Perfetto (ui.perfetto.dev) and chrome://tracing: one row per worker."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

import msgspec

from evenstep.core.errors import ConfigError
from evenstep.telemetry.events import (
    Begun,
    Ended,
    Event,
    FetchedAhead,
    IterationDone,
    Noted,
    Pushed,
    Rested,
    Run,
    Stopped,
    Tallied,
)

_SERVERS: Final = -1
_ROUTINE: Final = (Begun, Ended, FetchedAhead, Pushed, Rested, Stopped, Tallied)
"""Events that are too frequent to mark in a trace."""


@final
class ChromeTrace:
    """Writes a file as events come. It can be opened even if it ends without a closing bracket.

    Raises:
        ConfigError: The file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the trace {path} cannot be written ({error.strerror}): give another file") from error
        self._file.write('[{"ph":"M","pid":0,"tid":0,"name":"process_name","args":{"name":"evenstep"}}')
        self._named: set[int] = set()
        self._zeros: dict[int, float] = {}

    def record(self, event: Event) -> None:
        """Add an event; events without a time are left out."""
        at = event.at
        if isinstance(event, Run):
            self._zeros[event.worker] = event.wall_offset
        elif at is None or isinstance(event, _ROUTINE):
            return
        elif isinstance(event, IterationDone):
            self._iteration(event, at)
        elif isinstance(event, Noted):
            values = {name: value for name, value in event.values.items() if value is not None}
            if values:
                self._write({"ph": "C", "name": f"noted by worker {event.worker}", "args": values}, event.worker, at)
        else:
            about = msgspec.to_builtins(event)
            args = {name: value for name, value in about.items() if name not in ("event", "at", "server")}
            self._write({"ph": "i", "s": "g", "name": event.kind, "args": args}, about.get("worker", _SERVERS), at)

    def _iteration(self, event: IterationDone, at: float) -> None:
        told = {name: getattr(event, name) for name in ("iteration", "samples", "staleness", "lead")}
        about = {name: value for name, value in told.items() if value is not None}
        whole = {"ph": "X", "name": f"iteration {event.iteration}", "args": about}
        self._write({**whole, "dur": 1e6 * event.iteration_seconds}, event.worker, at)
        for part in ("input", "compute", "wait", "comm"):
            seconds: float = getattr(event, f"{part}_seconds")
            if seconds > 0:
                self._write({"ph": "X", "name": part, "dur": 1e6 * seconds, "args": {}}, event.worker, at)
            at += seconds

    def _write(self, entry: Mapping[str, Any], worker: int, at: float) -> None:
        if worker not in self._named:
            self._named.add(worker)
            name = "servers" if worker == _SERVERS else f"worker {worker}"
            self._put({"ph": "M", "pid": 0, "tid": worker + 1, "name": "thread_name", "args": {"name": name}})
        shift = self._zeros.get(worker, next(iter(self._zeros.values()), 0.0))
        self._put({"pid": 0, "tid": worker + 1, "ts": round(1e6 * (at + shift), 3), "cat": "evenstep", **entry})

    def _put(self, entry: Mapping[str, Any]) -> None:
        self._file.write(",\n" + json.dumps(entry, separators=(",", ":")))

    def close(self) -> None:
        """No more events follow."""
        if not self._file.closed:
            self._file.write("]\n")
            self._file.close()
