"""A disturbance of its own for each worker: how a cluster of unlike devices is put together."""

from dataclasses import dataclass
from typing import final

from evenstep.cluster.slowness.base import Disturbance
from evenstep.cluster.slowness.slowness import Slowness
from evenstep.core.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PerWorker:
    """Worker i is disturbed by `parts_by_worker[i]`, which still sees i as the worker, so its randomness is i's own."""

    parts_by_worker: tuple[Disturbance, ...]

    def seconds(self, *, worker: int, iteration: int, batch_size: int, natural_seconds: float, now: float) -> float:
        """The seconds of this worker's part; ConfigError for a worker that has none."""
        return self._part(worker).seconds(
            worker=worker, iteration=iteration, batch_size=batch_size, natural_seconds=natural_seconds, now=now
        )

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        """That of this worker's part; ConfigError for a worker that has none."""
        return self._part(worker).slowness(before, worker=worker, iteration=iteration)

    def _part(self, worker: int) -> Disturbance:
        if not 0 <= worker < len(self.parts_by_worker):
            raise ConfigError(
                f"worker {worker} is not described, only workers 0 to {len(self.parts_by_worker) - 1} are; "
                f"describe as many workers as there are"
            )
        return self.parts_by_worker[worker]
