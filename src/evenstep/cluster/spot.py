"""When a worker that is lent and taken away is there: pure functions of (seed, worker), for the simulator."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Protocol, final

from evenstep.cluster.slowness.draw import Purpose, require_seed, uniforms
from evenstep.cluster.slowness.require import require_at_least, require_positive
from evenstep.core.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """A worker is there from `begins` to `ends` (infinite: for good), in seconds since the run began."""

    begins: float
    ends: float


class Spot(Protocol):
    """When a worker is there."""

    def stays(self, worker: int) -> Iterator[Stay]:
        """This worker's stays, in order and apart from each other; there may be no end of them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSpot:
    """Stays and absences of exponential length, so that at any moment the next interruption is as likely as at another.

    A worker is there from the beginning. Each worker has times of its own.

    Attributes:
        stays_seconds: The mean stay, > 0.
        away_seconds: The mean absence, > 0; None: who has left does not come back.
        seed: From 0 to 2**64 - 1.

    Raises:
        ConfigError: A value lies outside its range.
    """

    stays_seconds: float
    away_seconds: float | None = None
    seed: int

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        require_positive("stays", self.stays_seconds)
        if self.away_seconds is not None:
            require_positive("away", self.away_seconds)
        require_seed(self.seed)

    def stays(self, worker: int) -> Iterator[Stay]:
        begins = 0.0
        for number in count():
            draws = uniforms(2, seed=self.seed, purpose=Purpose.SPOT, worker=worker, index=number)
            ends = begins - self.stays_seconds * math.log(draws[0])
            yield Stay(begins=begins, ends=ends)
            if self.away_seconds is None:
                return
            begins = ends - self.away_seconds * math.log(draws[1])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSpot:
    """Stays as they were recorded; the same for every worker that names them.

    Attributes:
        recorded: At least one stay; each begins after the one before has ended.

    Raises:
        ConfigError: There is none, or they are not in order.
    """

    recorded: tuple[Stay, ...]

    def __post_init__(self) -> None:
        """Refuse stays that are none, or out of order."""
        if not self.recorded:
            raise ConfigError('recorded must hold at least one stay such as ["0 s", "90 s"]')
        for stay in self.recorded:
            require_at_least("the beginning of each stay", stay.begins, 0)
            if stay.ends <= stay.begins:
                raise ConfigError(f"a stay must end after it began, at {stay.begins:g} s, not at {stay.ends:g} s")
        for before, after in pairwise(self.recorded):
            if after.begins <= before.ends:
                raise ConfigError(
                    f"a stay must begin after the one before it ended, at {before.ends:g} s, not at {after.begins:g} s"
                )

    def stays(self, worker: int) -> Iterator[Stay]:
        return iter(self.recorded)
