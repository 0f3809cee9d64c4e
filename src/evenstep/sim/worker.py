"""One worker in virtual time: how long it computes, and what it reports."""

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

_DIGITS: Final = 3
"""Of a load in average samples, as a real worker rounds it."""


@final
class VirtualWorker:
    """Does for a described worker what `Tracker` and `Hold` of the runtime do for a real one, and rounds as they do.

    Args:
        spec: Its device and what disturbs it.
        number: Its rank, by which its randomness is drawn.
        scheme: What it computes under.

    Attributes:
        news: Tells when its slowness changes.
        memory_model: What it has learned of its memory; None if its memory has no limit to learn.
        factors: The driving factors before the iteration that was reported last; 1 if its predictor uses none.
    """

    def __init__(self, spec: ClusterWorker, number: int, scheme: Scheme) -> None:
        device = spec.device
        assert device is not None
        self._number = number
        self._curve = device.curve
        self._disturbances = tuple(part.seconds for part in spec.disturbances)
        self._micro_batch = scheme.micro_batch
        memory = device.memory
        self._fits = device.largest_batch if memory is None else min(device.largest_batch, memory.largest_batch)
        self._memory: DeviceMemory | None = None if scheme.micro_batch else memory
        self.memory_model = None
        if self._memory is not None:
            self.memory_model = MemoryModel(
                capacity_bytes=self._memory.capacity_bytes, base_bytes=self._memory.fixed_bytes, rounding_bytes=0
            )
        self._forecaster = Narx() if scheme.load.uses_forecasts else None
        self._size, self._natural, self._iteration = 0, 0.0, 0
        self._change_seconds = device.change_seconds
        self._sizes: set[float] = set()
        self.news = SlownessNews(spec.disturbance(), number)
        self._seen = spec.disturbance() if self._forecaster is not None else None
        self.factors = self._next_factors = Factors()

    def seconds(self, iteration: int, batch_size: int, now: float) -> float:
        """The compute time of this iteration, which begins now.

        Raises:
            ConfigError: The device does not hold the batch.
        """
        if batch_size != self._size:
            micro_batch = self._micro_batch
            if micro_batch is not None and batch_size > micro_batch:
                # As in the runtime's emulation, the device and the disturbances see each micro-batch by itself.
                whole, rest = divmod(batch_size, micro_batch)
                sizes = [micro_batch] * whole + [rest] * (rest > 0)
                return sum(self.seconds(iteration, size, now) for size in sizes)
            self._look_up(batch_size)
        seconds, self._iteration = self._natural, iteration
        for disturbed in self._disturbances:
            seconds = disturbed(
                worker=self._number, iteration=iteration, batch_size=batch_size, natural_seconds=seconds, now=now
            )
        return seconds + self._change(batch_size)

    def cost_seconds(
        self, iteration: int, amounts: Sequence[float], now: float, *, batch_size: int | None = None
    ) -> float:
        """The same for samples that differ in cost: what each micro-batch costs, in average samples.

        `batch_size`: the samples, if the worker is not told costs, so that its memory counts samples.
        """
        if batch_size is not None:
            self._require_room(min(batch_size, self._micro_batch or batch_size))
        whole, self._iteration = 0.0, iteration
        for amount in amounts:
            if batch_size is None:
                self._require_room(math.ceil(amount), " of average cost")
            seconds = self._curve.seconds(amount)
            for disturbed in self._disturbances:
                seconds = disturbed(
                    worker=self._number, iteration=iteration, batch_size=amount, natural_seconds=seconds, now=now
                )
            whole += seconds + self._change(amount)
        return whole

    def _change(self, size: float) -> float:
        """What the first batch of this size takes besides."""
        if not self._change_seconds or size in self._sizes:
            return 0.0
        self._sizes.add(size)
        return self._change_seconds

    def _require_room(self, batch_size: int, kind: str = "") -> None:
        if batch_size > self._fits:
            raise ConfigError(
                f"worker {self._number} was given {batch_size} samples{kind} but its device holds at most {self._fits}:"
                " lower the batch size or choose a scheme that minds memory, such as lb-bsp"
            )

    def _look_up(self, batch_size: int) -> None:
        self._require_room(batch_size)
        self._size, self._natural = batch_size, self._curve.seconds(batch_size)

    def cost_row(self, load: float, compute_seconds: float, largest_pass: float) -> tuple[int, ...]:
        """As `row` where samples differ in cost; `load` and `largest_pass` are in average samples."""
        load = round(load, _DIGITS)
        return self.row(round(load) or int(load > 0), compute_seconds, math.ceil(largest_pass), load=load)

    def row(
        self,
        samples: int,
        compute_seconds: float,
        largest_pass: int,
        *,
        load: float | None = None,
    ) -> tuple[int, ...]:
        """What this worker reports of an iteration: a row of `Reports`.

        `largest_pass` is the largest batch that it computed on at once. The forecaster gets the rounded numbers that
        are reported, or the `load`, which has more digits.
        """
        microseconds = round(compute_seconds * 1e6)
        largest = UNLIMITED
        if self.memory_model is not None and self._memory is not None:
            self.memory_model.observe(largest_pass, self._memory.peak_bytes(largest_pass))
            largest = self.memory_model.largest_size()
        if self._forecaster is None:
            return (samples, microseconds, 0, largest)
        self.factors, self._next_factors = self._next_factors, self._factors(self._iteration + 1)
        self._forecaster.observe(Sample(samples if load is None else load, microseconds / 1e6), self.factors)
        return (samples, microseconds, self._forecaster.forecast(self._next_factors), largest)

    def _factors(self, iteration: int) -> Factors:
        return Factors() if self._seen is None else factors_of(self._seen, worker=self._number, iteration=iteration)


def batch_of(samples: int, minimum: int) -> int:
    """The batch of a worker with that many samples: filled up with copies if it has fewer than the minimum."""
    own = samples or 1
    return own if own >= minimum else own * -(-minimum // own)
