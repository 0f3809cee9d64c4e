"""Readings that are too slow, or change too slowly, to be taken in every iteration."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar, final

Value = TypeVar("Value")


@final
class Spaced(Generic[Value]):
    """A reading that is kept until `seconds` have passed since it was taken, and `rests` times what it took.

    The second condition bounds the cost where a reading is slow, such as /proc/stat, which lists every core. What it
    took is processor time, because on a busy machine a reading may be interrupted for long.

    Args:
        read: Takes the reading.
        seconds: The least time between two readings.
        clock: Seconds that only rise.
        rests: 1000: a reading may take a thousandth of the time.
        processor_time: The seconds that this thread has computed.
    """

    def __init__(
        self,
        read: Callable[[], Value],
        *,
        seconds: float,
        clock: Callable[[], float],
        rests: float = 1000.0,
        processor_time: Callable[[], float] = time.thread_time,
    ) -> None:
        self._read = read
        self._seconds = seconds
        self._clock = clock
        self._rests = rests
        self._processor_time = processor_time
        self._kept: tuple[float, float, Value] | None = None

    def value(self, seconds: float | None = None) -> Value:
        """The newest reading, taken now where it is due; `seconds` replaces the constructor's for this once."""
        now = self._clock()
        if self._kept is not None:
            taken, rest, value = self._kept
            if now - taken < max(self._seconds if seconds is None else seconds, rest):
                return value
        began = self._processor_time()
        value = self._read()
        self._kept = (now, self._rests * (self._processor_time() - began), value)
        return value
