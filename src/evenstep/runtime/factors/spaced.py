"""Readings that are too slow, or change too slowly, to be taken in every iteration."""

from collections.abc import Callable
from typing import Final, Generic, TypeVar, final

Value = TypeVar("Value")

_COST: Final = 1000


@final
class Spaced(Generic[Value]):
    """A reading that is kept until `seconds` have passed since it was taken, and a thousand times what it took.

    The second condition bounds the cost where a reading is slow: /proc/stat takes a millisecond on a machine with
    hundreds of cores.
    """

    def __init__(self, read: Callable[[], Value], *, seconds: float, clock: Callable[[], float]) -> None:
        self._read = read
        self._seconds = seconds
        self._clock = clock
        self._kept: tuple[float, float, Value] | None = None

    def value(self, seconds: float | None = None) -> Value:
        """The newest reading, taken now where it is due; `seconds` replaces the constructor's for this once."""
        began = self._clock()
        if self._kept is not None:
            taken, cost, value = self._kept
            if began - taken < max(self._seconds if seconds is None else seconds, _COST * cost):
                return value
        value = self._read()
        self._kept = (began, self._clock() - began, value)
        return value
