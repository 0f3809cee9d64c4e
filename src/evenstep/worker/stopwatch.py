"""Measures a worker's own compute: from the hand-out of a batch to its last gradient bucket, without any waiting.

`backward()` takes equally long on every rank, because it ends with the all-reduce. Only the time until the last bucket
is ready, before anything is sent, belongs to the worker itself.
"""

from collections.abc import Callable
from typing import Protocol, final

from evenstep.core.values import Sample


class Stopwatch(Protocol):
    """Runs while a batch is computed. `lag`: by how many iterations `lap` comes late."""

    lag: int

    @property
    def running(self) -> bool:
        """Whether it runs."""

    def restart(self) -> None:
        """Reset to zero, not running."""

    def run(self) -> None:
        """Start or continue; does nothing if it runs."""

    def pause(self) -> None:
        """Stop; does nothing if it does not run."""

    def drop(self) -> None:
        """Stop, and forget the time since it was last started."""

    def read(self) -> float:
        """Seconds since `restart`, of a paused stopwatch. May wait for the device."""

    def synchronised(self) -> None:
        """The synchronisation that started with the last pause is over. Does nothing if there is none."""

    def synchronised_seconds(self) -> float | None:
        """How long the synchronisation of the last lap's iteration took; None if the host's clock measures it."""

    def lap(self, samples: float, passes: int) -> Sample | None:
        """Close an iteration; return the mean pass of the newest iteration whose time is known without waiting.

        Closing the same iteration again replaces it.

        Args:
            samples: The samples of all passes.
            passes: The number of passes.
        """


@final
class HostStopwatch:
    """For models on the CPU. The host's clock measures the compute, so a lap returns the iteration that it closes."""

    lag = 0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def running(self) -> bool:
        return self._since is not None

    def restart(self) -> None:
        self._seconds, self._since = 0.0, None

    def run(self) -> None:
        if self._since is None:
            self._since = self._clock()

    def pause(self) -> None:
        if self._since is not None:
            self._seconds += self._clock() - self._since
            self._since = None

    def drop(self) -> None:
        self._since = None

    def add(self, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self._seconds += seconds

    def read(self) -> float:
        return self._seconds

    def synchronised(self) -> None:
        pass

    def synchronised_seconds(self) -> None:
        return None

    def lap(self, samples: float, passes: int) -> Sample | None:
        return Sample(samples=samples / passes, compute_seconds=self._seconds / passes)
