"""Weights & Biases: one run, in which each worker has its own metrics over its own iterations."""

from typing import final

from evenstep.core.errors import ConfigError
from evenstep.telemetry.events import Event
from evenstep.telemetry.sinks import Points


@final
class WandB:
    """Logs `worker-RANK/compute_seconds` and so on, over `worker-RANK/iteration`.

    The settings of wandb hold, such as `WANDB_MODE=offline`, `WANDB_DIR` and `WANDB_API_KEY`.

    Raises:
        ConfigError: wandb is not installed.
    """

    def __init__(self, project: str, name: str) -> None:
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise ConfigError("--wandb needs wandb: pip install 'evenstep[wandb]'") from error
        self._run = wandb.init(project=project, name=name, job_type="evenstep")
        self._points = Points()
        self._known: set[int] = set()

    def record(self, event: Event) -> None:
        """Add an event of a worker; other events are left out."""
        point = self._points.of(event)
        if point is None:
            return
        prefix = f"worker-{point.worker}"
        if point.worker not in self._known:
            self._known.add(point.worker)
            self._run.define_metric(f"{prefix}/*", step_metric=f"{prefix}/iteration")
        values = {f"{prefix}/{name}": value for name, value in point.values.items()}
        self._run.log({f"{prefix}/iteration": point.iteration, **values})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
