"""TensorBoard's event files: a run per worker, so that workers are lines of one chart."""

from pathlib import Path
from typing import Any, final

from evenstep.core.errors import ConfigError
from evenstep.telemetry.events import Event
from evenstep.telemetry.sinks import Points


@final
class TensorBoard:
    """Writes `LOG_DIR/worker-RANK/events.out.tfevents...`, with scripts' notes under `noted/`.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, log_dir: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event as Entry
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError as error:
            raise ConfigError("--tensorboard needs tensorboard: pip install tensorboard") from error
        self._event, self._summary, self._open = Entry, Summary, EventFileWriter
        self._log_dir = log_dir
        self._writers: dict[int, Any] = {}
        self._points = Points()

    def record(self, event: Event) -> None:
        """Add an event of a worker; other events are left out."""
        point = self._points.of(event)
        if point is None:
            return
        if point.worker not in self._writers:
            self._writers[point.worker] = self._open(str(self._log_dir / f"worker-{point.worker}"))
        tagged = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        entry = self._event(wall_time=point.wall, step=point.iteration, summary=self._summary(value=tagged))
        self._writers[point.worker].add_event(entry)

    def close(self) -> None:
        """Flush and close the files."""
        for writer in self._writers.values():
            writer.close()
