"""The disturbances that slow workers, and their combinations."""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Annotated, Final, Literal, TypeAlias, final

from evenstep.cluster.record import (
    DURATION,
    FACTOR,
    FROM_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    SHARE,
    WHOLE,
    Listed,
    require_ranges,
)
from evenstep.cluster.slowness.base import NO_SLOWNESS, Disturbance, Slowness
from evenstep.cluster.slowness.draw import Purpose, uniform, uniforms
from evenstep.core.errors import ConfigError

_NORMAL: Final = NormalDist()
_JITTER: Final = int(Purpose.JITTER)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Disturbances in sequence: each gets the previous one's seconds as its natural seconds; with none, these remain.

    The order matters: a device replaces the seconds before it, and a later factor multiplies extra seconds.
    """

    parts: tuple[Disturbance, ...] = ()

    def seconds(self, *, worker: int, iteration: int, batch_size: float, natural_seconds: float) -> float:
        seconds = natural_seconds
        for part in self.parts:
            seconds = part.seconds(worker=worker, iteration=iteration, batch_size=batch_size, natural_seconds=seconds)
        return seconds

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        for part in self.parts:
            before = part.slowness(before, worker=worker, iteration=iteration)
        return before


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PerWorker:
    """Worker i is disturbed by `parts_by_worker[i]`, which still sees i as the worker and so draws i's random numbers.

    Both methods raise ConfigError for a worker without a part.
    """

    parts_by_worker: tuple[Disturbance, ...]

    def seconds(self, *, worker: int, iteration: int, batch_size: float, natural_seconds: float) -> float:
        return self._part(worker).seconds(
            worker=worker, iteration=iteration, batch_size=batch_size, natural_seconds=natural_seconds
        )

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        return self._part(worker).slowness(before, worker=worker, iteration=iteration)

    def _part(self, worker: int) -> Disturbance:
        if not 0 <= worker < len(self.parts_by_worker):
            raise ConfigError(
                f"worker {worker} is not described, only workers 0 to {len(self.parts_by_worker) - 1} are; "
                f"describe as many workers as there are"
            )
        return self.parts_by_worker[worker]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Disturbance):
    """Persistent slowness: `factor` (>= 1) times the natural seconds, plus `extra_seconds` (>= 0) for any batch size.

    Only `worker` is slowed; None: every worker. Raises ConfigError if a value lies outside its range.

    >>> Constant(worker=3, extra_seconds=0.05).seconds(
    ...     worker=3, iteration=0, batch_size=32, natural_seconds=0.1
    ... )
    0.45
    """

    worker: Annotated[int | None, WHOLE] = None
    factor: Annotated[float, FACTOR] = 4.0
    extra_seconds: Annotated[float, "extra", DURATION, NOT_NEGATIVE] = 0.0

    def __post_init__(self) -> None:
        require_ranges(self)

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        if self.worker not in (None, worker):
            return before
        return before.then(factor=self.factor, extra_seconds=self.extra_seconds)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class From(Disturbance):
    """Slowness from iteration `first` up to, but not including, iteration `until`.

    For several intervals, use a `Chain` of these.

    Attributes:
        factor: Slowdown inside the interval, >= 1.
        first: The first slow iteration, from 0.
        until: The first fast iteration after that, > `first`; None: slow to the end of the run.

    Raises:
        ConfigError: A value lies outside its range.
    """

    factor: Annotated[float, FACTOR] = 4.0
    first: Annotated[int, WHOLE]
    until: Annotated[int | None, WHOLE] = None

    def __post_init__(self) -> None:
        require_ranges(self)
        if self.until is not None and self.until <= self.first:
            raise ConfigError(f"until must be greater than first, which is {self.first}, not {self.until!r}")

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        slow = iteration >= self.first and (self.until is None or iteration < self.until)
        return before.then(factor=self.factor) if slow else before


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Episodic(Disturbance):
    """One slow episode in each period of `period` iterations, as if another job shared the machine.

    Each worker has its episodes at its own times.

    Its length is uniform in [`shortest`, `longest`] and its start uniform among those that keep it inside the period,
    so on average a fraction (`shortest` + `longest`) / (2 `period`) of the iterations is slow. Any iteration takes
    constant time to compute, because the episode of a period does not depend on other periods.

    Attributes:
        factor: Slowdown inside an episode, >= 1.
        period: Iterations that hold one episode, >= 1.
        shortest: The fewest iterations of an episode, >= 0; with 0, some periods have none.
        longest: The most iterations of an episode, from `shortest` to `period`.
        seed: From 0 to 2**64 - 1.

    Raises:
        ConfigError: A value lies outside its range.
    """

    factor: Annotated[float, FACTOR] = 4.0
    period: Annotated[int, FROM_ONE]
    shortest: Annotated[int, WHOLE]
    longest: Annotated[int, WHOLE]
    seed: Annotated[int, SEED]

    def __post_init__(self) -> None:
        require_ranges(self)
        if not self.shortest <= self.longest <= self.period:
            raise ConfigError(
                f"longest must lie between shortest, which is {self.shortest}, and period, which is {self.period}, "
                f"not {self.longest!r}"
            )

    def episode(self, *, worker: int, number: int) -> range:
        """The iterations of a worker's episode `number`, from 0."""
        draws = uniforms(2, seed=self.seed, purpose=Purpose.EPISODE, worker=worker, index=number)
        length = self.shortest + int(draws[0] * (self.longest - self.shortest + 1))
        start = number * self.period + int(draws[1] * (self.period - length + 1))
        return range(start, start + length)

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        slow = iteration in self.episode(worker=worker, number=iteration // self.period)
        return before.then(factor=self.factor) if slow else before


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Multiplies the seconds of every worker by a lognormal factor of mean 1, independent for each iteration.

    With z standard normal, exp(sigma z - sigma^2 / 2) has mean 1, and relative standard deviation `spread` if sigma^2 =
    ln(1 + spread^2).

    Attributes:
        spread: Relative standard deviation of the factor, >= 0; 0.05 is five per cent.
        seed: From 0 to 2**64 - 1.

    Raises:
        ConfigError: A value lies outside its range.
    """

    spread: Annotated[float, SHARE, NOT_NEGATIVE]
    seed: Annotated[int, SEED]

    def __post_init__(self) -> None:
        require_ranges(self)

    def seconds(self, *, worker: int, iteration: int, batch_size: float, natural_seconds: float) -> float:
        variance = math.log1p(self.spread**2)
        normal = _NORMAL.inv_cdf(uniform(self.seed, _JITTER, worker, iteration))
        return natural_seconds * math.exp(math.sqrt(variance) * normal - variance / 2)

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        return before


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trace(Disturbance):
    """Recorded factors, one per iteration, repeated from the beginning when they end; the same for every worker.

    Attributes:
        factors: One or more factors > 0; below 1 if the recorded worker was faster than its reference.

    Raises:
        ConfigError: A value lies outside its range.
    """

    factors: Annotated[tuple[float, ...], Listed(POSITIVE)]

    def __post_init__(self) -> None:
        require_ranges(self)
        if not self.factors:
            raise ConfigError("factors must hold at least one number")
        for at, factor in enumerate(self.factors):
            POSITIVE.read(f"factors[{at}]", factor)

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        return before.then(factor=self.factors[iteration % len(self.factors)])


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
