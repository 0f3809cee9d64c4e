"""MLflow: one run, in which each worker has its own metrics."""

from typing import Final, final

from evenstep.core.errors import ConfigError
from evenstep.telemetry.events import Event
from evenstep.telemetry.sinks import Points

_MOST_IN_A_BATCH: Final = 900
"""Below the 1000 that a tracking server takes at once."""


@final
class MLflow:
    """Logs `worker-RANK/compute_seconds` and so on, by iteration, to the tracking server of MLflow's settings.

    Raises:
        ConfigError: mlflow is not installed.
    """

    def __init__(self, experiment: str, name: str) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric
        except ModuleNotFoundError as error:
            raise ConfigError("--mlflow needs mlflow: pip install 'evenstep[mlflow]'") from error
        self._metric = Metric
        self._client = MlflowClient()
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known is not None else self._client.create_experiment(experiment)
        self._run = self._client.create_run(number, run_name=name).info.run_id
        self._points = Points()
        self._waiting: list[object] = []

    def record(self, event: Event) -> None:
        """Add an event of a worker; other events are left out."""
        point = self._points.of(event)
        if point is None:
            return
        milliseconds = round(point.wall * 1000)
        for name, value in point.values.items():
            self._waiting.append(self._metric(f"worker-{point.worker}/{name}", value, milliseconds, point.iteration))
        if len(self._waiting) > _MOST_IN_A_BATCH - 50:
            self._send()

    def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_MOST_IN_A_BATCH], self._waiting[_MOST_IN_A_BATCH:]
            self._client.log_batch(self._run, metrics=batch)

    def close(self) -> None:
        """Send what is left, and end the run."""
        self._send()
        self._client.set_terminated(self._run)
