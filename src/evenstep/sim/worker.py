"""One worker in virtual time: its compute times and its reports."""

import math
from collections.abc import Sequence
from typing import Final, final

from evenstep.cluster import ClusterWorker
from evenstep.cluster.slowness import DeviceMemory, SlownessNews, factors_of
from evenstep.core.errors import ConfigError
from evenstep.core.load.narx import Narx
from evenstep.core.memory import MemoryModel
from evenstep.core.values import UNLIMITED, Factors, Sample
from evenstep.schemes import Scheme

NO_REPORT: Final = (0, 0, 0, UNLIMITED)
"""The report of a worker if nothing depends on it."""
_DIGITS: Final = 3
"""Decimal digits of a load in average samples, rounded as by a real worker."""


@final
class VirtualWorker:
    """The counterpart of the runtime's `Tracker` and `Hold` for a described worker, with the same rounding.

    Args:
        spec: Its device and its disturbances.
        number: Its rank, from which its random numbers are drawn.
        scheme: The scheme under which it computes.
        by_cost: Whether it knows the costs of samples.

    Attributes:
        news: Tells when its slowness changes.
        memory_model: What it has learned about its memory; None if its memory has no limit to learn.
        factors: The driving factors before the last reported iteration; 1 if its predictor uses none.
    """

    # Thousands of workers take turns, so what each keeps in memory decides how fast a run is.
    __slots__ = (
        "_change_seconds", "_disturbance", "_fits", "_forecaster", "_iteration", "_memory", "_next_factors", "_sizes",
        "_unit", "factors", "memory_model", "news", "number",
    )  # fmt: skip

    def __init__(self, spec: ClusterWorker, number: int, scheme: Scheme, *, by_cost: bool) -> None:
        device = spec.device
        assert device is not None
        self.number = number
        self._unit = " of average cost" if by_cost else ""
        memory = device.memory
        self._fits = device.largest_batch if memory is None else min(device.largest_batch, memory.largest_batch)
        self._memory: DeviceMemory | None = None if scheme.micro_batch else memory
        self.memory_model = None
        if self._memory is not None:
            self.memory_model = MemoryModel(
                capacity_bytes=self._memory.capacity_bytes, base_bytes=self._memory.fixed_bytes, rounding_bytes=0
            )
        self._forecaster = Narx() if scheme.load.uses_forecasts else None
        self._iteration = 0
        self._change_seconds = device.change_seconds
        self._sizes: set[float] | None = set() if device.change_seconds else None
        self._disturbance = spec.disturbance()
        self.news = SlownessNews(self._disturbance, number)
        self.factors = self._next_factors = Factors()

    def seconds(self, iteration: int, amounts: Sequence[float], largest: float) -> float:
        """The compute seconds of this iteration.

        Args:
            iteration: The worker's own count of iterations.
            amounts: The size of each micro-batch, in samples; if samples differ in cost, in average samples.
            largest: The memory that the largest micro-batch takes, in samples or, by cost, in average samples.

        Raises:
            ConfigError: The device does not hold the largest micro-batch.
        """
        if largest > self._fits:
            raise ConfigError(
                f"worker {self.number} was given {math.ceil(largest)} samples{self._unit} but its device holds at most"
                f" {self._fits}: lower the batch size or choose a scheme that minds memory, such as lb-bsp"
            )
        whole, self._iteration = 0.0, iteration
        for amount in amounts:
            # As in the runtime's emulation, the device and the disturbances see each micro-batch separately.
            seconds = self._disturbance.seconds(
                worker=self.number, iteration=iteration, batch_size=amount, natural_seconds=0.0
            )
            if self._sizes is not None and amount not in self._sizes:
                self._sizes.add(amount)
                seconds += self._change_seconds
            whole += seconds
        return whole

    def row(self, load: float, compute_seconds: float, largest: float) -> tuple[int, ...]:
        """This worker's report about an iteration: a row of `Reports`.

        Its speed is measured by the load, and `largest` took the most memory at once; both are in samples or, by cost,
        in average samples. The forecaster gets the rounded numbers of the report, or the load, which has more digits.
        """
        load = round(load, _DIGITS)
        # A load of less than half a sample counts as one, because 0 means that nothing was computed.
        samples, microseconds, limit = round(load) or int(load > 0), round(compute_seconds * 1e6), UNLIMITED
        if self.memory_model is not None and self._memory is not None:
            size = math.ceil(largest)
            self.memory_model.observe(size, self._memory.peak_bytes(size))
            limit = self.memory_model.largest_size()
        if self._forecaster is None:
            return (samples, microseconds, 0, limit)
        before = factors_of(self._disturbance, worker=self.number, iteration=self._iteration + 1)
        self.factors, self._next_factors = self._next_factors, before
        self._forecaster.observe(Sample(load, microseconds / 1e6), self.factors)
        return (samples, microseconds, self._forecaster.forecast(self._next_factors), limit)
