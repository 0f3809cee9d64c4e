"""The times at which a spot worker is present: pure functions of (seed, worker), for the simulator."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Annotated, NamedTuple, TypeAlias, final

from evenstep.cluster.record import DURATION, POSITIVE, SEED, Listed, Pair, require_ranges
from evenstep.cluster.slowness.draw import Purpose, uniforms
from evenstep.core.errors import ConfigError


class Stay(NamedTuple):
    """A worker is present from `begins` to `ends` (infinite: for good), in seconds since the run began."""

    begins: float
    ends: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSpot:
    """Stays and absences of exponential length, so that an interruption is equally likely at any moment.

    A worker is present from the start. Each worker has its own times.

    Attributes:
        stays_seconds: The mean stay, > 0.
        away_seconds: The mean absence, > 0; None: a worker that has left does not come back.
        seed: From 0 to 2**64 - 1.

    Raises:
        ConfigError: A value lies outside its range.
    """

    stays_seconds: Annotated[float, "stays", DURATION, POSITIVE]
    away_seconds: Annotated[float | None, "away", DURATION, POSITIVE] = None
    seed: Annotated[int, SEED]

    def __post_init__(self) -> None:
        require_ranges(self)

    def stays(self, worker: int) -> Iterator[Stay]:
        """This worker's stays, in order and without overlap; possibly infinitely many."""
        begins = 0.0
        for number in count():
            draws = uniforms(2, seed=self.seed, purpose=Purpose.SPOT, worker=worker, index=number)
            ends = begins - self.stays_seconds * math.log(draws[0])
            yield Stay(begins, ends)
            if self.away_seconds is None:
                return
            begins = ends - self.away_seconds * math.log(draws[1])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSpot:
    """Recorded stays, the same for every worker: at least one, each after the end of the previous one.

    Raises:
        ConfigError: There are none, or they are not in order.
    """

    recorded: Annotated[
        tuple[Stay, ...], Listed(Pair(rules=(DURATION, DURATION), example='["0 s", "90 s"]', make=Stay))
    ]

    def __post_init__(self) -> None:
        if not self.recorded:
            raise ConfigError('recorded must hold at least one stay such as ["0 s", "90 s"]')
        for stay in self.recorded:
            if not 0 <= stay.begins < stay.ends:
                raise ConfigError(f"a stay must end after it began, at {stay.begins:g} s, not at {stay.ends:g} s")
        for before, after in pairwise(self.recorded):
            if after.begins <= before.ends:
                raise ConfigError(
                    f"a stay must begin after the one before it ended, at {before.ends:g} s, not at {after.begins:g} s"
                )

    def stays(self, worker: int) -> Iterator[Stay]:
        """The stays, in order."""
        return iter(self.recorded)


Spot: TypeAlias = DrawnSpot | RecordedSpot
"""The presence of a worker over time."""
