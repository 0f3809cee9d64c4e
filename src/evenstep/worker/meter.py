"""Measures one worker's compute, learns from it, and makes the row for the other workers: its plan, and its speed.

Compute is the time from the hand-out of a batch to its last gradient bucket, without any waiting. `backward()` takes
equally long on every rank, because it ends with the all-reduce. Only the time until the last bucket is ready, before
anything is sent, belongs to the worker itself.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, final
from zlib import crc32

import numpy as np

from evenstep.core.disagreement import refuse_other_plans
from evenstep.core.load.narx import Narx
from evenstep.core.values import UNLIMITED, Factors, IntArray, Reports, Sample, State
from evenstep.worker.device_memory import LearntLimit
from evenstep.worker.iteration import Iteration

if TYPE_CHECKING:
    from evenstep.worker.peers import Peers

COLUMNS: Final = 3 + Reports.columns()
"""The number of columns of a row without extra ones."""


class Stopwatch(Protocol):
    """Runs while a batch is computed. `lag`: by how many iterations `lap` comes late."""

    lag: int

    @property
    def running(self) -> bool:
        """True while it runs."""

    @property
    def synchronised_seconds(self) -> float | None:
        """Seconds of the synchronisation of the last lap's iteration; None if the host's clock measures it."""

    def restart(self) -> None:
        """Reset to zero, and start."""

    def run(self) -> None:
        """Start or continue; does nothing if it runs."""

    def pause(self) -> None:
        """Stop; does nothing if it does not run."""

    def drop(self) -> None:
        """Stop, and forget the time since it was last started."""

    def read(self) -> float:
        """Seconds since `restart`, of a paused stopwatch. May wait for the device."""

    def synchronised(self) -> None:
        """Note that the synchronisation that began with the last pause is over. Does nothing if there is none."""

    def lap(self, samples: float, passes: int) -> tuple[float, float] | None:
        """Close an iteration; return the samples and seconds of the mean pass of the newest one known without waiting.

        Closing the same iteration again replaces it.

        Args:
            samples: The samples of all passes.
            passes: The number of passes.
        """


@final
class HostStopwatch:
    """For models on the CPU. The host's clock measures the compute, so a lap returns the iteration that it closes."""

    lag = 0
    synchronised_seconds = None

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = self._since = 0.0
        self.running = False

    def restart(self) -> None:
        self._seconds, self._since, self.running = 0.0, self._clock(), True

    def run(self) -> None:
        if not self.running:
            self._since, self.running = self._clock(), True

    def pause(self) -> None:
        if self.running:
            self._seconds += self._clock() - self._since
            self.running = False

    def drop(self) -> None:
        self.running = False

    def add(self, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self._seconds += seconds

    def read(self) -> float:
        return self._seconds

    def synchronised(self) -> None:
        pass

    def lap(self, samples: float, passes: int) -> tuple[float, float]:
        return samples / passes, self._seconds / passes


@final
@dataclass(slots=True, kw_only=True, eq=False)
class Meter:
    """Measures a worker's iterations.

    Attributes:
        stopwatch: Measures the compute.
        forecaster: Forecasts the next iteration; None if sizes do not depend on that.
        factors: Reads the driving factors before the next iteration, of a machine or of an emulated one.
        memory: Learns the largest batch; None if the memory is not watched.
        received: The reports of all workers on the finished iteration, and their `input_seconds` and `script_seconds`
            in microseconds, shape [workers, 2], until sizes are decided from them.
    """

    stopwatch: Stopwatch
    forecaster: Narx | None = None
    factors: Callable[[], Factors] = Factors
    memory: LearntLimit | None = None
    received: tuple[Reports, IntArray] | None = field(init=False, default=None)
    # The newest last. A measurement may come `lag` iterations late, so its factors stand first.
    _factors: deque[Factors] = field(init=False)

    def __post_init__(self) -> None:
        lag = self.stopwatch.lag
        self._factors = deque([Factors()] * (2 + lag), maxlen=2 + lag)

    def row(self, now: Iteration) -> list[int]:
        """Learn from this iteration and return what the other workers need, in the order of `Reports`."""
        lap = self.stopwatch.lap(now.load, now.passes)
        now.device_synchronised_seconds = self.stopwatch.synchronised_seconds
        load, microseconds = (0, 0) if lap is None else (lap[0], round(lap[1] * 1e6))
        load = round(load) if now.costs is None else round(load, 3)
        largest_size, forecast = UNLIMITED, 0
        if self.memory is not None:
            if not now.observed:
                self.memory.observe(math.ceil(max(now.amounts)))
            largest_size = self.memory.largest_size()
        if self.forecaster is not None:
            if not now.observed:
                self._factors.append(self.factors())
            self._observe(now, Sample(load, microseconds / 1e6), self.forecaster)
            forecast = self.forecaster.forecast(self._factors[-1])
        now.observed = True
        # A load of less than half a sample is one, since 0 means that nothing was computed.
        return [round(load) or int(load > 0), microseconds, forecast, largest_size]

    def state_dict(self) -> State:
        """Return what the forecaster has learned, for a checkpoint."""
        return {} if self.forecaster is None else self.forecaster.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Continue from the given state."""
        if self.forecaster is not None and state:
            self.forecaster.load_state_dict(state)

    def _observe(self, now: Iteration, sample: Sample, forecaster: Narx) -> None:
        """Feed the forecaster with the recorded digits only, so that a replay of the records decides the same.

        If an iteration has several synchronised backwards (of two models, say), each measurement contains the earlier
        ones and replaces them.
        """
        if now.forecaster_before is None:
            now.forecaster_before = forecaster.state_dict()
        else:
            forecaster.load_state_dict(now.forecaster_before)
        now.factors = self._factors[0]
        forecaster.observe(sample, now.factors)


class Rows:
    """A row of integers from each worker: fingerprint of its plan, times outside compute, report, `extra`.

    It does not communicate: it makes this worker's row and takes in the rows of all workers.

    Args:
        meter: Measures this worker's iterations.
        exchange_plans: Returns the plans of all workers for this worker's, by rank; all workers must call it together.
        peers: The processes of each worker if these are several. Each then has a row and a plan.
    """

    def __init__(
        self,
        meter: Meter,
        exchange_plans: Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]],
        peers: "Peers | None" = None,
    ) -> None:
        self._meter = meter
        self._peers = peers
        self._exchange_plans = exchange_plans
        self._plan: tuple[Any, ...] = ()
        """The part of the plan that the last row was made for, besides its sizes."""
        self._sizes = np.zeros(0, dtype=np.int64)

    def row(
        self,
        now: Iteration,
        *,
        weighed: bool = False,
        rates: Sequence[float] = (),
        steps: int = 0,
        extra: Sequence[int] = (),
    ) -> list[int]:
        """Make this worker's row for the iteration, `weighed` by units or not, stepped at `rates` after `steps`."""
        self._plan = now.loader, now.epoch, now.number, now.share.iteration, weighed, steps, rates
        self._sizes = now.share.sizes
        fingerprint = crc32(self._sizes.data, crc32(repr(self._plan).encode()))
        outside = round(now.input_seconds * 1e6), round(now.script_seconds * 1e6)
        return [fingerprint, *outside, *self._meter.row(now), *extra]

    def check(self, rows: IntArray) -> IntArray:
        """Check that all workers followed the same plan, and keep their reports; returns the extra columns.

        Raises:
            DisagreementError: They followed different plans.
        """
        if len(set(fingerprints := rows[:, 0].tolist())) > 1:
            with nullcontext() if self._peers is None else self._peers.naming():
                refuse_other_plans(self._plans, fingerprints)
        if self._peers is not None:
            rows = self._peers.slowest(rows)
        self._meter.received = Reports(*rows[:, 3:COLUMNS].T), rows[:, 1:3]
        return rows[:, COLUMNS:]

    def _plans(self) -> Sequence[Mapping[str, Any]]:
        plan = dict(
            zip(("loader", "epoch", "iteration", "slice", "weighed", "steps", "rates"), self._plan, strict=True)
        )
        plan["weighed"] = "units" if plan["weighed"] else "samples"
        plan["rates"] = [float(rate) for rate in plan["rates"]]
        return self._exchange_plans({**plan, "sizes": self._sizes.tolist()})
