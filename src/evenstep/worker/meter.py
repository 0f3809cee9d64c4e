"""What one worker knows about its own compute: measures it, learns from it, and makes the row for the other workers."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Protocol, final

from evenstep.core.load.estimate import Estimator
from evenstep.core.values import UNLIMITED, Basis, Estimate, Factors
from evenstep.worker.device_memory import LearntLimit
from evenstep.worker.iteration import Iteration
from evenstep.worker.stopwatch import Stopwatch

_UNKNOWN: Final = Factors()
_NOTHING: Final = Estimate()
_DIGITS: Final = 3
"""Of a load in average samples."""


class Sampler(Protocol):
    """Reads the driving factors of a machine, or of an emulated one."""

    def sample(self) -> Factors:
        """Those before the next iteration."""


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Meter:
    """Measures a worker's iterations.

    Attributes:
        stopwatch: Measures the compute.
        estimator: Predicts the compute of the next iteration.
        predicts: Whether to predict. If not, because sizes do not depend on it and no log keeps it, 0 is reported.
        sampler: Reads the driving factors; None if the predictor does not use them.
        memory: Learns the largest batch; None if the memory is not watched.
    """

    stopwatch: Stopwatch
    estimator: Estimator
    predicts: bool = True
    sampler: Sampler | None = None
    memory: LearntLimit | None = None
    _several_measurements: bool = field(init=False, default=False)
    # The newest last. A measurement may come `lag` iterations late, so its basis and factors stand first.
    _bases: deque[Basis] = field(init=False)
    _factors: deque[Factors] = field(init=False)

    def __post_init__(self) -> None:
        lag = self.stopwatch.lag
        self._bases = deque(maxlen=1 + lag)
        self._factors = deque([Factors()] * (2 + lag), maxlen=2 + lag)

    def begin(self) -> None:
        """Start measuring a new iteration."""
        self.stopwatch.restart()
        if self.memory is not None:
            self.memory.begin()

    def row(self, now: Iteration) -> list[int]:
        """Learn from this iteration and return what the other workers need, in the order of `Reports`."""
        lap = self.stopwatch.lap(sum(now.loads), now.passes)
        now.device_synchronised_seconds = self.stopwatch.synchronised_seconds()
        load, microseconds = (0, 0) if lap is None else (lap.samples, round(lap.compute_seconds * 1e6))
        load = round(load) if now.costs is None else round(load, _DIGITS)
        if not now.observed:
            self._factors.append(_UNKNOWN if self.sampler is None else self.sampler.sample())
            self._bases.append(now.basis)
            if self.memory is not None:
                self.memory.observe(math.ceil(max(now.amounts)))
        self._observe(now, load, microseconds)
        largest_size = UNLIMITED if self.memory is None else self.memory.largest_size()
        estimate = self.estimator.estimate(self._factors[-1]) if self.predicts else _NOTHING
        # A load of less than half a sample is one, since 0 means that nothing was computed.
        return [round(load) or int(load > 0), microseconds, *estimate, largest_size]

    def _observe(self, now: Iteration, samples: float, microseconds: int) -> None:
        """Feed the estimator with the recorded digits only, so that a replay of the records decides the same.

        If an iteration has several synchronised backwards (of two models, say), each measurement contains the earlier
        ones and replaces them. This is known from the second iteration on; the first keeps its first measurement.
        """
        if now.observed and now.estimator_before is None:
            self._several_measurements = True
            return
        if not self.predicts:
            now.observed = True
            return
        if now.estimator_before is not None:
            self.estimator.load_state_dict(now.estimator_before)
        elif self._several_measurements:
            now.estimator_before = self.estimator.state_dict()
        now.observed = True
        now.factors = self._factors[0]
        if self._bases[0] != "comparison":
            self.estimator.observe(samples, microseconds / 1e6, now.factors)
