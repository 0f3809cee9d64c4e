"""The last measurements of a worker, and the range that they lie in."""

import math
from collections import deque
from typing import cast, final

from evenstep.core.load.predict.noise import seconds_per_sample
from evenstep.core.values import Sample, State


@final
class Recent:
    """The logarithms of the last `length` measured seconds per sample.

    Logarithms, because speeds scatter and change by factors; a log speed is the negative of them.
    """

    __slots__ = ("_logs",)

    def __init__(self, length: int) -> None:
        self._logs: deque[float] = deque(maxlen=length)

    @property
    def logs(self) -> tuple[float, ...]:
        """Oldest first."""
        return tuple(self._logs)

    def observe(self, sample: Sample) -> None:
        self._logs.append(math.log(seconds_per_sample(sample)))

    def clamp(self, log: float, *, slack: float = 0.0) -> float:
        """The number, or the end of the range that it lies beyond; the range is wider by `slack` on each side."""
        return min(max(log, min(self._logs) - slack), max(self._logs) + slack)

    def clear(self) -> None:
        self._logs.clear()

    def state_dict(self) -> State:
        return {"logs": list(self._logs)}

    def load_state_dict(self, state: State) -> None:
        self._logs.clear()
        self._logs.extend(cast("list[float]", state["logs"]))
