"""The last known activity of a worker's main thread, and the workers that the others wait for."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self, final


@final
class Doing(StrEnum):
    """The possible activities of a main thread."""

    PREPARING = "preparing"  # Inside `prepare`.
    FETCHING = "fetching"  # It asked the loader for a batch and waits for it: for reading, or for a data worker.
    COMPUTING = "computing"  # It got a batch, and the optimizer has not stepped on it.
    COUNTING = "counting"  # It waits for the other workers' counts in `weigh_by`.
    HEARING = "hearing"  # It waits to hear what data of their own the other workers have.
    WAITING = "waiting"  # Its own part is done; it waits for the other workers or for the servers.
    STEPPED = "stepped"  # The optimizer has stepped, or no batch was asked for yet; the script has control.
    LEFT = "left"  # It has left the loop over the loader.
    CHECKPOINTING = "checkpointing"  # It writes or reads its part of a checkpoint.


_PHRASES = {
    Doing.PREPARING: ("in prepare", ""),
    Doing.FETCHING: ("waiting for the data of iteration {}", ""),
    Doing.COMPUTING: ("outside the loader", ", in iteration {}"),
    Doing.COUNTING: ("waiting for what the others give weigh_by", ", in iteration {}"),
    Doing.HEARING: ("waiting to hear what data the others have", ", in iteration {}"),
    Doing.WAITING: ("waiting for the others", ", in iteration {}"),
    Doing.STEPPED: ("outside the loader", ", after iteration {}"),
    Doing.LEFT: ("outside the loop", ", after iteration {}"),
    Doing.CHECKPOINTING: ("in a checkpoint", ", after iteration {}"),
}

_BETWEEN = frozenset({Doing.STEPPED, Doing.LEFT, Doing.CHECKPOINTING})
"""Activities between two iterations."""

WAITS = frozenset({Doing.HEARING, Doing.COUNTING, Doing.WAITING})
"""Activities that end when the other workers come."""

_ORDER = {Doing.FETCHING: 1, Doing.COMPUTING: 2, Doing.HEARING: 3, Doing.COUNTING: 3, Doing.WAITING: 3}
"""The order of the activities within an iteration; all others come before."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A main thread's activity, for how many `seconds`, and in (or after) which iteration; -1 before the first.

    `left`: the iteration after which it last left a loop over the loader; -1 if it never has.
    """

    doing: Doing
    iteration: int
    seconds: float
    left: int = -1

    def __str__(self) -> str:
        """The rest of a sentence that begins with the worker.

        >>> str(Seen(doing=Doing.STEPPED, iteration=57, seconds=14.2))
        'has been outside the loader for 14 s, after iteration 57'
        """
        place, where = (text.format(self.iteration) for text in _PHRASES[self.doing])
        return f"has been {place} for {self.seconds:.0f} s{where if self.iteration >= 0 else ''}"


def next_iteration(doing: Doing, iteration: int) -> int:
    """The iteration that a main thread completes next if it does this in or after the given one.

    >>> next_iteration(Doing.STEPPED, 57)
    58
    """
    return iteration + (doing in _BETWEEN)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """A sign of life: `beats` rises while the process lives; `seen` is its main thread's activity."""

    beats: int
    seen: Seen

    def to_text(self) -> str:
        """Return the pulse as JSON."""
        seen = self.seen
        return json.dumps([self.beats, seen.doing, seen.iteration, round(seen.seconds, 3), seen.left])

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read the text that `to_text` wrote.

        >>> pulse = Pulse(beats=3, seen=Seen(doing=Doing.FETCHING, iteration=58, seconds=2.5))
        >>> Pulse.from_text(pulse.to_text()) == pulse
        True
        """
        beats, doing, iteration, seconds, left = json.loads(text)
        return cls(beats=beats, seen=Seen(doing=Doing(doing), iteration=iteration, seconds=seconds, left=left))


FIRST_PULSE = Pulse(beats=0, seen=Seen(doing=Doing.PREPARING, iteration=-1, seconds=0.0))


def behind(seen: Mapping[int, Seen], *, least_seconds: float = 0.0) -> list[int]:
    """The workers that the others wait for, ascending: the least advanced ones; empty if all are level.

    A waiting worker is further than one that computes in the same iteration, and less far than any in a later one,
    which has made a call that it missed. A worker whose activity began less than `least_seconds` ago is not named.

    >>> waiting = Seen(doing=Doing.WAITING, iteration=58, seconds=9.0)
    >>> behind({0: waiting, 1: waiting, 2: Seen(doing=Doing.STEPPED, iteration=57, seconds=9.5)})
    [2]
    >>> behind({0: waiting, 1: waiting})
    []
    """
    progress = {
        worker: (next_iteration(each.doing, each.iteration), _ORDER.get(each.doing, 0)) for worker, each in seen.items()
    }
    least, furthest = min(progress.values()), max(progress.values())
    if least == furthest:
        return []
    return sorted(worker for worker in progress if progress[worker] == least and seen[worker].seconds >= least_seconds)
