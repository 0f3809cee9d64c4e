"""The interface of disturbances, and reports of the slowness that they cause."""

from dataclasses import dataclass, replace
from typing import Final, Protocol, final

from evenstep.core.values import Factors


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """The slowdown of an iteration: `factor` times its seconds (below 1: faster), plus `extra_seconds` >= 0.

    `processor` and `memory` are the parts of the machine's, 0 to 1, that its cause leaves to the worker, if it can be
    seen.
    """

    factor: float = 1.0
    extra_seconds: float = 0.0
    processor: float = 1.0
    memory: float = 1.0

    def then(self, *, factor: float, extra_seconds: float = 0.0) -> "Slowness":
        """Combine this slowness with another on top of it."""
        return replace(self, factor=self.factor * factor, extra_seconds=self.extra_seconds * factor + extra_seconds)

    def is_like(self, other: "Slowness") -> bool:
        """True if the two differ by at most five per cent."""
        pairs = ((self.factor, other.factor), (self.extra_seconds, other.extra_seconds))
        return all(max(pair) <= 1.05 * min(pair) for pair in pairs)


NO_SLOWNESS: Final = Slowness()


class Disturbance(Protocol):
    """Decides how long a worker's compute takes, given its natural time.

    A pure function of its arguments and of the values that the object was made from: the order of the calls and the
    process do not matter, so a run in real time and its replay in virtual time agree.
    """

    def seconds(self, *, worker: int, iteration: int, batch_size: float, natural_seconds: float) -> float:
        """The total seconds (>= 0) of this iteration's compute, including the natural part: as `slowness` says.

        Args:
            worker: The worker's id, from 0.
            iteration: The worker's own count of iterations, from 0.
            batch_size: Samples of this iteration, from 0.
            natural_seconds: The undisturbed compute, >= 0.
        """
        slow = self.slowness(NO_SLOWNESS, worker=worker, iteration=iteration)
        return natural_seconds * slow.factor + slow.extra_seconds

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        """The worker's slowness in this iteration, on top of `before`, the slowness by earlier disturbances.

        Neither jitter, which changes in every iteration, nor the time of a device counts.
        """


@final
class SlownessNews:
    """Tells when the slowness of one worker begins, changes or ends; call it in each of its iterations."""

    def __init__(self, disturbance: Disturbance, worker: int) -> None:
        self._disturbance = disturbance
        self._worker = worker
        self._reported = NO_SLOWNESS

    def of(self, iteration: int) -> Slowness | None:
        """The slowness from this iteration on, if it lasts and differs from the last reported one; else None."""
        now = self._at(iteration)
        if now.is_like(self._reported):
            return None
        # Slowness of less than three iterations is noise.
        if not all(self._at(later).is_like(now) for later in (iteration + 1, iteration + 2)):
            return None
        self._reported = now
        return now

    def _at(self, iteration: int) -> Slowness:
        return self._disturbance.slowness(NO_SLOWNESS, worker=self._worker, iteration=iteration)


def factors_of(disturbance: Disturbance, *, worker: int, iteration: int) -> Factors:
    """The driving factors that the worker reads before this iteration; 1 if nothing visible is taken.

    So a change is seen before the first iteration that it slows, as in the paper (LB-BSP, arXiv 1806.02508). A real
    competitor that starts after the reading, while the worker waits, is seen one iteration later.
    """
    slow = disturbance.slowness(NO_SLOWNESS, worker=worker, iteration=iteration)
    return Factors(cpu_availability=slow.processor, memory_availability=slow.memory)
