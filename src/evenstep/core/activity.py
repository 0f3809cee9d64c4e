"""What a worker's main thread was last seen doing, and which of several workers the others wait for."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self, final


@final
class Doing(StrEnum):
    """What a main thread can be seen doing."""

    PREPARING = "preparing"  # Inside `prepare`.
    FETCHING = "fetching"  # It asked the loader for a batch and waits for it: for reading, or for a data worker.
    COMPUTING = "computing"  # It got a batch, and the optimizer has not stepped on it.
    WAITING = "waiting"  # Its own part is done; it waits for the other workers or for the servers.
    STEPPED = "stepped"  # The optimizer has stepped, or no batch was asked for yet; the script has control.
    LEFT = "left"  # It has left the loop over the loader.
    CHECKPOINTING = "checkpointing"  # It writes or reads its part of a checkpoint.


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
"""What happens between two iterations."""

_ORDER = {Doing.FETCHING: 1, Doing.COMPUTING: 2, Doing.WAITING: 3}
"""The order of what happens within an iteration; anything else comes before."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a main thread is doing, for how many `seconds`, and in (or after) which iteration; -1 before the first."""

    doing: Doing
    iteration: int
    seconds: float

    @property
    def next_iteration(self) -> int:
        """The iteration that it completes next.

        >>> Seen(doing=Doing.STEPPED, iteration=57, seconds=0.1).next_iteration
        58
        """
        return next_iteration(self.doing, self.iteration)

    def __str__(self) -> str:
        """The rest of a sentence that begins with the worker.

        >>> str(Seen(doing=Doing.STEPPED, iteration=57, seconds=14.2))
        'has been outside the loader for 14 s, after iteration 57'
        """
        place, where = (text.format(self.iteration) for text in _PHRASES[self.doing])
        return f"has been {place} for {self.seconds:.0f} s{where if self.iteration >= 0 else ''}"


def next_iteration(doing: Doing, iteration: int) -> int:
    """The iteration that a main thread completes next, which does this in or after the given one."""
    return iteration + (doing in _BETWEEN)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """A sign of life: `beats` rises while the process lives; `seen` is what its main thread does."""

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
    """The workers whose pulse did not beat between two looks, ascending."""
    return sorted(worker for worker, pulse in after.items() if pulse.beats == before[worker].beats)


def behind(seen: Mapping[int, Seen], *, least_seconds: float = 0.0) -> list[int]:
    """The workers that the others wait for, ascending: those that have progressed least; empty if all are alike.

    A worker that waits has progressed further than one that computes in the same iteration, and less than any in a
    later one, which has made a call that it missed. A worker that has done what it does for less than `least_seconds`
    is not named.

    >>> waiting = Seen(doing=Doing.WAITING, iteration=58, seconds=9.0)
    >>> behind({0: waiting, 1: waiting, 2: Seen(doing=Doing.STEPPED, iteration=57, seconds=9.5)})
    [2]
    >>> behind({0: waiting, 1: waiting})
    []
    """
    progress = {worker: (each.next_iteration, _ORDER.get(each.doing, 0)) for worker, each in seen.items()}
    least, furthest = min(progress.values()), max(progress.values())
    if least == furthest:
        return []
    return sorted(worker for worker in progress if progress[worker] == least and seen[worker].seconds >= least_seconds)
