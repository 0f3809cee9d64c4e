"""The Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open: a row for each worker."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

from evenstep.core.errors import ConfigError

_PARTS: Final = ("input", "compute", "wait", "comm")
_SERVERS: Final = -1
_MOMENTS: Final = frozenset(
    (
        "join",
        "leave",
        "regroup",
        "snapshot",
        "snapshot_failed",
        "restored",
        "lost",
        "checkpoint",
        "disturbance",
        "error",
        "out_of_memory",
        "servers_restarted",
        "servers_lost",
        "server_failed",
    )
)
"""What happens at a time and takes none."""


@final
class ChromeTrace:
    """Writes a file as events come; it can be opened even where it ends without a closing bracket.

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

    def record(self, event: Mapping[str, Any]) -> None:
        """Add an event; those without a time are left out."""
        kind, worker = event["event"], event.get("worker", _SERVERS)
        if kind == "run":
            # Clocks of several hosts are brought together by the wall clock.
            self._zeros[worker] = event.get("unix_seconds", 0.0) - event.get("at", 0.0)
        elif "at" not in event:
            return
        elif kind == "iteration":
            self._iteration(worker, event)
        elif kind == "note":
            values = {name: value for name, value in event["values"].items() if value is not None}
            if values:
                self._write({"ph": "C", "name": f"noted by worker {worker}", "args": values}, worker, event["at"])
        elif kind in _MOMENTS:
            about = {key: value for key, value in event.items() if key not in ("event", "at", "server")}
            self._write({"ph": "i", "s": "g", "name": kind, "args": about}, worker, event["at"])

    def _iteration(self, worker: int, event: Mapping[str, Any]) -> None:
        at = event["at"]
        about = {key: event[key] for key in ("iteration", "samples", "staleness", "lead") if key in event}
        whole = {"ph": "X", "name": f"iteration {event['iteration']}", "args": about}
        self._write({**whole, "dur": 1e6 * event["iteration_seconds"]}, worker, at)
        for part in _PARTS:
            seconds = event[f"{part}_seconds"]
            if seconds > 0:
                self._write({"ph": "X", "name": part, "dur": 1e6 * seconds, "args": {}}, worker, at)
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
        """Nothing more will come."""
        if not self._file.closed:
            self._file.write("]\n")
            self._file.close()
