"""What one worker knows about its own compute: measures it, learns from it, and makes the row for the other workers."""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Protocol, final

from evenstep.core.load.narx import Narx
from evenstep.core.values import UNLIMITED, Factors, Sample, State
from evenstep.worker.device_memory import LearntLimit
from evenstep.worker.iteration import Iteration
from evenstep.worker.stopwatch import Stopwatch

_UNKNOWN: Final = Factors()
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
        forecaster: Forecasts the next iteration; None if sizes do not depend on that.
        sampler: Reads the driving factors for it; None without a forecaster.
        memory: Learns the largest batch; None if the memory is not watched.
    """

    stopwatch: Stopwatch
    forecaster: Narx | None = None
    sampler: Sampler | None = None
    memory: LearntLimit | None = None
    _several_measurements: bool = field(init=False, default=False)
    # The newest last. A measurement may come `lag` iterations late, so its factors stand first.
    _factors: deque[Factors] = field(init=False)

    def __post_init__(self) -> None:
        lag = self.stopwatch.lag
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
            if self.memory is not None:
                self.memory.observe(math.ceil(max(now.amounts)))
        self._observe(now, Sample(load, microseconds / 1e6))
        largest_size = UNLIMITED if self.memory is None else self.memory.largest_size()
        forecast = 0 if self.forecaster is None else self.forecaster.forecast(self._factors[-1])
        # A load of less than half a sample is one, since 0 means that nothing was computed.
        return [round(load) or int(load > 0), microseconds, forecast, largest_size]

    def state_dict(self) -> State:
        """What the forecaster has learned, for a checkpoint."""
        return {} if self.forecaster is None else self.forecaster.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Continue from the given state."""
        if self.forecaster is not None and state:
            self.forecaster.load_state_dict(state)

    def _observe(self, now: Iteration, sample: Sample) -> None:
        """Feed the forecaster with the recorded digits only, so that a replay of the records decides the same.

        If an iteration has several synchronised backwards (of two models, say), each measurement contains the earlier
        ones and replaces them. This is known from the second iteration on; the first keeps its first measurement.
        """
        again, now.observed, forecaster = now.observed, True, self.forecaster
        if forecaster is None:
            return
        if again and now.forecaster_before is None:
            self._several_measurements = True
            return
        if now.forecaster_before is not None:
            forecaster.load_state_dict(now.forecaster_before)
        elif self._several_measurements:
            now.forecaster_before = forecaster.state_dict()
        now.factors = self._factors[0]
        forecaster.observe(sample, now.factors)
