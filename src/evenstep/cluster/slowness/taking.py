"""Disturbances with a visible cause: other processes take a part of the worker's processors or memory."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from evenstep.cluster.slowness.base import NO_SLOWNESS, Disturbance, Slowness
from evenstep.cluster.slowness.disturbances import Chain, PerWorker
from evenstep.core.values import Factors

Taken: TypeAlias = Literal["processor", "memory"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Taking:
    """A disturbance by other processes, which take a resource of the worker's machine while they slow it.

    While the part slows the worker F times, 1 / F of that resource is available to the worker.
    """

    part: Disturbance
    takes: Taken

    def seconds(self, *, worker: int, iteration: int, batch_size: float, natural_seconds: float) -> float:
        return self.part.seconds(
            worker=worker, iteration=iteration, batch_size=batch_size, natural_seconds=natural_seconds
        )

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        return self.part.slowness(before, worker=worker, iteration=iteration)


def factors_of(disturbance: Disturbance, *, worker: int, iteration: int) -> Factors:
    """The driving factors that the worker reads before this iteration; 1 if nothing visible is taken.

    So a change is seen before the first iteration that it slows, as in the paper (LB-BSP, arXiv 1806.02508). A real
    competitor that starts after the reading, while the worker waits, is seen one iteration later.
    """
    left = {"processor": 1.0, "memory": 1.0}
    for part in _takings(disturbance, worker):
        left[part.takes] /= max(part.slowness(NO_SLOWNESS, worker=worker, iteration=iteration).factor, 1.0)
    return Factors(cpu_availability=left["processor"], memory_availability=left["memory"])


def _takings(disturbance: Disturbance, worker: int) -> list[Taking]:
    if isinstance(disturbance, Taking):
        return [disturbance]
    parts: tuple[Disturbance, ...] = ()
    if isinstance(disturbance, Chain):
        parts = disturbance.parts
    elif isinstance(disturbance, PerWorker):
        parts = (disturbance.parts_by_worker[worker],)
    return [each for part in parts for each in _takings(part, worker)]
