"""Trackio: one run, in which each worker has its own metrics at its own iterations."""

from typing import final

from evenstep.core.errors import ConfigError
from evenstep.telemetry.events import Event
from evenstep.telemetry.sinks import Points


@final
class Trackio:
    """Logs `worker-RANK/compute_seconds` and so on at the worker's iteration as step.

    The settings of trackio hold, such as `TRACKIO_DIR` and `TRACKIO_SPACE_ID`. Without a space it stays on this host.

    Raises:
        ConfigError: trackio is not installed.
    """

    def __init__(self, project: str, name: str) -> None:
        try:
            import trackio
        except ModuleNotFoundError as error:
            raise ConfigError("--trackio needs trackio: pip install 'evenstep[trackio]'") from error
        # What this machine does while a run is exported says nothing about the run.
        self._run = trackio.init(project, name, embed=False, auto_log_gpu=False, auto_log_cpu=False)
        self._points = Points()

    def record(self, event: Event) -> None:
        """Add an event of a worker; other events are left out."""
        point = self._points.of(event)
        if point is not None:
            values = {f"worker-{point.worker}/{name}": value for name, value in point.values.items()}
            self._run.log(values, step=point.iteration)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
