"""Disturbances with a visible cause: other processes take a part of the worker's processors or memory."""

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, final

from evenstep.cluster.slowness.base import NO_SLOWNESS, Disturbance, Slowness
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
        alone = self.part.slowness(NO_SLOWNESS, worker=worker, iteration=iteration)
        after = self.part.slowness(before, worker=worker, iteration=iteration)
        if self.takes == "memory":
            return replace(after, memory=after.memory / max(alone.factor, 1.0))
        return replace(after, processor=after.processor / max(alone.factor, 1.0))


def factors_of(disturbance: Disturbance, *, worker: int, iteration: int) -> Factors:
    """The driving factors that the worker reads before this iteration; 1 if nothing visible is taken.

    So a change is seen before the first iteration that it slows, as in the paper (LB-BSP, arXiv 1806.02508). A real
    competitor that starts after the reading, while the worker waits, is seen one iteration later.
    """
    slow = disturbance.slowness(NO_SLOWNESS, worker=worker, iteration=iteration)
    return Factors(cpu_availability=slow.processor, memory_availability=slow.memory)
