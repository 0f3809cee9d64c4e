"""What a worker's main thread was last seen doing, and which of several workers the others wait for."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import final


@final
class Doing(StrEnum):
    """What a main thread can be seen doing."""

    PREPARING = "preparing"
    """It is inside `prepare`."""
    FETCHING = "fetching"
    """It asked the loader for a batch and has not got it: reading data, or waiting for a data worker."""
    COMPUTING = "computing"
    """It got a batch and has not completed its gradient."""
    WAITING = "waiting"
    """Its own part is done; it waits for the other workers or for the servers."""
    STEPPED = "stepped"
    """The optimizer has stepped; the script has not asked for the next batch."""
    LEFT = "left"
    """It has left the loop over the loader."""


_PHRASES = {
    Doing.PREPARING: ("in prepare", ""),
    Doing.FETCHING: ("waiting for the data of iteration {}", ""),
    Doing.COMPUTING: ("outside the loader", ", in iteration {}"),
    Doing.WAITING: ("waiting for the others", ", in iteration {}"),
    Doing.STEPPED: ("outside the loader", ", after iteration {}"),
    Doing.LEFT: ("outside the loop", ", after iteration {}"),
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A main thread at one moment.

    Attributes:
        doing: What it does.
        iteration: The iteration it is in; the last one where it has stepped or left; -1 before the first.
        seconds: How long it has been doing that.
    """

    doing: Doing
    iteration: int
    seconds: float

    def __str__(self) -> str:
        """The rest of a sentence that begins with the worker.

        >>> str(Seen(doing=Doing.STEPPED, iteration=57, seconds=14.2))
        'has been outside the loader for 14 s, after iteration 57'
        """
        place, where = (text.format(self.iteration) for text in _PHRASES[self.doing])
        return f"has been {place} for {self.seconds:.0f} s{where if self.iteration >= 0 else ''}"


def behind(seen: Mapping[int, Seen]) -> list[int]:
    """The workers that the others wait for, ascending; empty where nothing tells them apart.

    A worker that waits holds nobody, unless it waits in an earlier iteration than another: then it missed a call that
    the others made.

    >>> waiting = Seen(doing=Doing.WAITING, iteration=58, seconds=9.0)
    >>> behind({0: waiting, 1: waiting, 2: Seen(doing=Doing.STEPPED, iteration=57, seconds=9.5)})
    [2]
    """
    busy = sorted(worker for worker, each in seen.items() if each.doing is not Doing.WAITING)
    if busy:
        return busy
    last = max(each.iteration for each in seen.values())
    return sorted(worker for worker, each in seen.items() if each.iteration < last)
