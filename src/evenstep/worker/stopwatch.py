"""Measures a worker's pure compute: from the hand-out of a batch to the last gradient bucket, less all waiting.

`backward()` as a whole takes equally long on every rank, because it ends with the all-reduce; the moment when the last
bucket is ready, before anything is sent, is the worker's own.
"""

from collections.abc import Callable
from typing import Protocol, final

from evenstep.core.values import Sample


class Stopwatch(Protocol):
    """Runs while a batch is being computed on.

    `late` is by how many iterations its laps come late.
    """

    lag: int

    @property
    def running(self) -> bool:
        """Whether it runs."""

    def restart(self) -> None:
        """From zero."""

    def run(self) -> None:
        """Compute begins or goes on; does nothing where it is running already."""

    def pause(self) -> None:
        """Compute ends or is interrupted; does nothing where it is not running."""

    def drop(self) -> None:
        """Stop, and forget the stretch since it was last run."""

    def read(self) -> float:
        """Seconds since `restart`, of a paused stopwatch; waits for the device where it must."""

    def synchronised(self) -> None:
        """What all workers have computed is here: the synchronisation that began with the last pause is over.

        Does nothing where it was over already, or has not begun.
        """

    def synchronised_seconds(self) -> float | None:
        """What the synchronisation took in the iteration that `lap` gave last; None where the host's clock tells it."""

    def lap(self, samples: int, passes: int) -> Sample | None:
        """Close an iteration of `samples` in so many passes; the mean pass of the newest iteration whose time is known.

        "Known" means known without waiting for the device. Closing the same iteration again replaces what was closed.
        """


@final
class HostStopwatch:
    """For models on the CPU: its time is the host's, so a lap returns the iteration that it closes."""

    lag = 0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self._since is not None

    def restart(self) -> None:
        """From zero."""
        self._seconds, self._since = 0.0, None

    def run(self) -> None:
        """Go on."""
        if self._since is None:
            self._since = self._clock()

    def pause(self) -> None:
        """Stop."""
        if self._since is not None:
            self._seconds += self._clock() - self._since
            self._since = None

    def drop(self) -> None:
        """Stop, and forget the stretch since it was last run."""
        self._since = None

    def read(self) -> float:
        """Seconds since `restart`."""
        return self._seconds

    def synchronised(self) -> None:
        """Nothing: the host has waited for it."""

    def synchronised_seconds(self) -> None:
        """None: the host has waited for it."""

    def lap(self, samples: int, passes: int) -> Sample | None:
        """This iteration."""
        return Sample(samples=samples / passes, compute_seconds=self._seconds / passes)
