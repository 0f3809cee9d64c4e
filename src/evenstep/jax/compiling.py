"""The time that JAX spends compiling."""

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
        """The seconds so far."""
        return sum(end - start for start, end in self._spans)

    def ended(self, event: str, duration: float, **_: object) -> None:
        """Take an event from JAX, which took `duration` seconds and has just ended."""
        if event.startswith(_PREFIX):
            end = time.perf_counter()
            start = end - duration
            while self._spans and self._spans[-1][0] >= start:  # Of nested events, the outer one ends last.
                self._spans.pop()
            self._spans.append((start, end))
