"""The time in which JAX compiles."""

import time
from typing import Final, final

import jax

_PREFIX: Final = "/jax/core/compile/"


@final
class Compiling:
    """Seconds of tracing, lowering and compiling; overlapping times count once."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self.ended)

    @property
    def seconds(self) -> float:
        """So far."""
        return sum(end - start for start, end in self._spans)

    def ended(self, event: str, duration: float, **_: object) -> None:
        """JAX reports an event that took `duration` seconds and has just ended."""
        if event.startswith(_PREFIX):
            end = time.perf_counter()
            start = end - duration
            while self._spans and self._spans[-1][0] >= start:  # The outer of two ends last.
                self._spans.pop()
            self._spans.append((start, end))
