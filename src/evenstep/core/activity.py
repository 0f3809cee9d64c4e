"""What a worker's main thread was last seen doing, and which of several workers the others wait for."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self, final


@final
class Doing(StrEnum):
    """What a main thread can be seen doing."""

    PREPARING = "preparing"
    """It is inside `prepare`."""
    FETCHING = "fetching"
    """It asked the loader for a batch and has not got it: reading data, or waiting for a data worker."""
    COMPUTING = "computing"
    """It got a batch and the optimizer has not stepped on it."""
    WAITING = "waiting"
    """Its own part is done; it waits for the other workers or for the servers."""
    STEPPED = "stepped"
    """The optimizer has stepped, or nothing was handed out yet; the script has not asked for the next batch."""
    LEFT = "left"
    """It has left the loop over the loader."""
    CHECKPOINTING = "checkpointing"
    """It writes or reads its part of a checkpoint."""


_PHRASES = {
    Doing.PREPARING: ("in prepare", ""),
    Doing.FETCHING: ("waiting for the data of iteration {}", ""),
    Doing.COMPUTING: ("outside the loader", ", in iteration {}"),
    Doing.WAITING: ("waiting for the others", ", in iteration {}"),
    Doing.STEPPED: ("outside the loader", ", after iteration {}"),
    Doing.LEFT: ("outside the loop", ", after iteration {}"),
    Doing.CHECKPOINTING: ("in a checkpoint", ", after iteration {}"),
}

_BETWEEN = frozenset({Doing.STEPPED, Doing.LEFT, Doing.CHECKPOINTING})
"""What is done after one iteration and before the next."""

_ORDER = {
    Doing.PREPARING: 0,
    Doing.STEPPED: 0,
    Doing.LEFT: 0,
    Doing.CHECKPOINTING: 0,
    Doing.FETCHING: 1,
    Doing.COMPUTING: 2,
    Doing.WAITING: 3,
}
"""The order of what happens within an iteration."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A main thread at one moment.

    Attributes:
        doing: What it does.
        iteration: The iteration it is in; the last one where it is between two; -1 before the first.
        seconds: How long it has been doing that.
    """

    doing: Doing
    iteration: int
    seconds: float

    @property
    def next_iteration(self) -> int:
        """The iteration that it has not completed yet.

        >>> Seen(doing=Doing.STEPPED, iteration=57, seconds=0.1).next_iteration
        58
        """
        return self.iteration + (self.doing in _BETWEEN)

    def __str__(self) -> str:
        """The rest of a sentence that begins with the worker.

        >>> str(Seen(doing=Doing.STEPPED, iteration=57, seconds=14.2))
        'has been outside the loader for 14 s, after iteration 57'
        """
        place, where = (text.format(self.iteration) for text in _PHRASES[self.doing])
        return f"has been {place} for {self.seconds:.0f} s{where if self.iteration >= 0 else ''}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """A sign of life: a number that counts up while the process lives, and what its main thread does."""

    beats: int
    seen: Seen

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps([self.beats, self.seen.doing, self.seen.iteration, round(self.seen.seconds, 3)])

    @classmethod
    def from_text(cls, text: str) -> Self:
        """What `to_text` wrote.

        >>> pulse = Pulse(beats=3, seen=Seen(doing=Doing.FETCHING, iteration=58, seconds=2.5))
        >>> Pulse.from_text(pulse.to_text()) == pulse
        True
        """
        beats, doing, iteration, seconds = json.loads(text)
        return cls(beats=beats, seen=Seen(doing=Doing(doing), iteration=iteration, seconds=seconds))


FIRST_PULSE = Pulse(beats=0, seen=Seen(doing=Doing.PREPARING, iteration=-1, seconds=0.0))


def silent(before: Mapping[int, Pulse], after: Mapping[int, Pulse]) -> list[int]:
    """The workers whose pulse did not move between two looks, ascending."""
    return sorted(worker for worker, pulse in after.items() if pulse.beats == before[worker].beats)


def behind(seen: Mapping[int, Seen], *, least_seconds: float = 0.0) -> list[int]:
    """The workers that the others wait for, ascending; empty where nothing tells them apart.

    These are the ones that have come least far. A worker that waits for the others has come further than one that
    computes in the same iteration, and less far than any in a later one: it missed a call that those made. A worker
    that has been at it for less than `least_seconds` is not named.

    >>> waiting = Seen(doing=Doing.WAITING, iteration=58, seconds=9.0)
    >>> behind({0: waiting, 1: waiting, 2: Seen(doing=Doing.STEPPED, iteration=57, seconds=9.5)})
    [2]
    >>> behind({0: waiting, 1: waiting})
    []
    """
    come = {worker: (each.next_iteration, _ORDER[each.doing]) for worker, each in seen.items()}
    least, furthest = min(come.values()), max(come.values())
    if least == furthest:
        return []
    return sorted(worker for worker in come if come[worker] == least and seen[worker].seconds >= least_seconds)
