"""TensorBoard's event files: a run per worker, so that workers are lines of one chart."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from evenstep.core.errors import ConfigError
from evenstep.telemetry.sinks.scalars import scalars_of


@final
class TensorBoard:
    """Writes `LOG_DIR/worker-RANK/events.out.tfevents...`, and what scripts noted under `noted/`.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, log_dir: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError as error:
            raise ConfigError("--tensorboard needs tensorboard: pip install 'evenstep[tensorboard]'") from error
        self._event, self._summary, self._open = Event, Summary, EventFileWriter
        self._log_dir = log_dir
        self._writers: dict[int, Any] = {}
        self._zeros: dict[int, float] = {}

    def record(self, event: Mapping[str, Any]) -> None:
        """Add an event of a worker; others are left out."""
        if "worker" not in event:
            return
        worker = event["worker"]
        if event["event"] == "run":
            self._zeros[worker] = event.get("unix_seconds", 0.0) - event.get("at", 0.0)
        elif event["event"] == "iteration":
            at = event.get("at", 0.0) + event["iteration_seconds"]
            self._write(worker, at, event["iteration"], dict(scalars_of(event)))
        elif event["event"] == "note":
            values = {f"noted/{name}": value for name, value in event["values"].items() if value is not None}
            self._write(worker, event["at"], event["iteration"], values)

    def _write(self, worker: int, at: float, step: int, values: Mapping[str, float]) -> None:
        if worker not in self._writers:
            self._writers[worker] = self._open(str(self._log_dir / f"worker-{worker}"))
        tagged = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        wall = at + self._zeros.get(worker, 0.0)
        self._writers[worker].add_event(self._event(wall_time=wall, step=step, summary=self._summary(value=tagged)))

    def close(self) -> None:
        """Write what is left, and close the files."""
        for writer in self._writers.values():
            writer.close()
