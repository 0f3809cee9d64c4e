"""Where events go: a file of JSON lines per worker, or nowhere."""

import json
import weakref
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, final

from evenstep.core.errors import ConfigError


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

    Raises:
        ConfigError: The run directory cannot be written.
    """

    def __init__(self, run_dir: Path, index: int, *, role: Literal["worker", "server"] = "worker") -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            # Line-buffered, so that a killed worker leaves whole lines behind.
            self._file = (run_dir / f"{role}-{index}.jsonl").open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the run directory {run_dir} cannot be written ({error}): give another one") from error

        self._writer = {role: index}
        # A training script has no place where it would close what `prepare` opened.
        self._finish = weakref.finalize(self, self._file.close)

    def record(self, event: Mapping[str, object]) -> None:
        """Append the event."""
        self._file.write(json.dumps({**self._writer, **event}, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._finish()


def read_events(
    run_dir: Path, *, kinds: Collection[str] | None = None, role: Literal["worker", "server"] = "worker"
) -> Iterator[dict[str, Any]]:
    """All events of a run directory, worker after worker, each worker's in the order in which they happened.

    Args:
        run_dir: The directory.
        kinds: Only events of these kinds; much faster where they are rare.
        role: `server`: those of the servers instead, one server after another; none where the run had no servers.

    Raises:
        ConfigError: The folder holds no worker's events, or a line is damaged (a last line torn by a kill is not).
    """
    files = sorted(run_dir.glob(f"{role}-*.jsonl"), key=lambda path: int(path.stem.partition("-")[2]))
    if not files and role == "worker":
        raise ConfigError(f"{run_dir} holds no worker-*.jsonl: give the --run-dir of a run")
    for path in files:
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines[:-1], start=1):
            if kinds is not None and not any(f'"event":"{kind}"' in line for kind in kinds):
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path} line {number} is not JSON ({error.msg}): delete or mend it") from error
