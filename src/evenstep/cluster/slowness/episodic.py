"""Episodic slowness: spells of it that come and go, as when another job shares the machine."""

from dataclasses import dataclass
from typing import final

from evenstep.cluster.slowness.draw import Purpose, require_seed, uniforms
from evenstep.cluster.slowness.require import require_at_least, require_worker
from evenstep.cluster.slowness.slowness import Slowness
from evenstep.core.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Episodic:
    """One slow episode in each period of `period` iterations.

    Its length is uniform in [`shortest`, `longest`] and its start uniform among those that keep it inside the period,
    so a share of (`shortest` + `longest`) / (2 `period`) of the iterations is slow on average. Each worker has episodes
    of its own. Any iteration is answered in constant time: the episode of a period depends on no other period.

    Attributes:
        worker: Whom it slows; None: every worker, each at times of its own.
        factor: Slowdown inside an episode, >= 1.
        period: Iterations that hold one episode, >= 1.
        shortest: The fewest iterations of an episode, >= 0; 0: some periods have none.
        longest: The most iterations of an episode, from `shortest` to `period`.
        seed: From 0 to 2**64 - 1.

    Raises:
        ConfigError: A value lies outside its range.
    """

    worker: int | None = None
    factor: float = 4.0
    period: int
    shortest: int
    longest: int
    seed: int

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        require_worker(self.worker)
        require_at_least("factor", self.factor, 1)
        require_at_least("period", self.period, 1)
        require_at_least("shortest", self.shortest, 0)
        if not self.shortest <= self.longest <= self.period:
            raise ConfigError(
                f"longest must lie between shortest, which is {self.shortest}, and period, which is {self.period}, "
                f"not {self.longest!r}"
            )
        require_seed(self.seed)

    def episode(self, *, worker: int, number: int) -> range:
        """The iterations of a worker's episode `number`, from 0; `worker` is not compared with whom it slows."""
        draws = uniforms(2, seed=self.seed, purpose=Purpose.EPISODE, worker=worker, index=number)
        length = self.shortest + int(draws[0] * (self.longest - self.shortest + 1))
        start = number * self.period + int(draws[1] * (self.period - length + 1))
        return range(start, start + length)

    def seconds(self, *, worker: int, iteration: int, batch_size: int, natural_seconds: float, now: float) -> float:
        """The slowed seconds inside an episode, the natural ones outside it and for other workers."""
        return natural_seconds * self.factor if self._is_slow(worker, iteration) else natural_seconds

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        """As before, and slower inside an episode; for other workers as before."""
        return before.then(factor=self.factor) if self._is_slow(worker, iteration) else before

    def _is_slow(self, worker: int, iteration: int) -> bool:
        return self.worker in (None, worker) and iteration in self.episode(
            worker=worker, number=iteration // self.period
        )
