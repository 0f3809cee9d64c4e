"""Measures a worker's pure compute: from the hand-out of a batch to the last gradient bucket, less all waiting.

`backward()` as a whole takes equally long on every rank, because it ends with the all-reduce; the moment when the last
bucket is ready, before anything is sent, is the worker's own.
"""

from collections.abc import Callable
from typing import Protocol, final

import torch

from evenstep.core.values import Sample


class Stopwatch(Protocol):
    """Runs while a batch is being computed on.

    `late` is by how many iterations its laps come late.
    """

    late: int

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

    def lap(self, samples: int, passes: int) -> Sample | None:
        """Close an iteration of `samples` in so many passes; the mean pass of the newest iteration whose time is known.

        "Known" means known without waiting for the device. Closing the same iteration again replaces what was closed.
        """


@final
class HostStopwatch:
    """For models on the CPU: its time is the host's, so a lap returns the iteration that it closes."""

    late = 0

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

    def lap(self, samples: int, passes: int) -> Sample | None:
        """This iteration."""
        return Sample(samples=samples / passes, compute_seconds=self._seconds / passes)


@final
class DeviceStopwatch:
    """For models on CUDA: pairs of events on the stream that is current at `restart`, read one iteration late.

    The events of the iteration that a lap closes are still ahead of the device; those of the one before have passed in
    all but pathological cases, so reading them does not stall the host.
    """

    late = 1

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._begun: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self._closed: tuple[int, int] | None = None
        self._previous: tuple[int, int, list[tuple[torch.cuda.Event, torch.cuda.Event]]] | None = None

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self._begun is not None

    def restart(self) -> None:
        """From zero; a closed iteration becomes the one before."""
        # Whoever pauses may do so in a stream of communication.
        self._stream = torch.cuda.current_stream()
        if self._closed is not None:
            self._previous = (*self._closed, self._pairs)
        self._pairs, self._begun, self._closed = [], None, None

    def run(self) -> None:
        """Mark the present end of the stream as the beginning of a stretch of compute."""
        if self._begun is None:
            self._begun = self._mark()

    def pause(self) -> None:
        """Mark the present end of the stream as the end of that stretch."""
        if self._begun is not None:
            self._pairs.append((self._begun, self._mark()))
            self._begun = None

    def drop(self) -> None:
        """Stop, and forget the stretch since it was last run."""
        self._begun = None

    def read(self) -> float:
        """Seconds since `restart`; waits for the device."""
        return _seconds(self._pairs)

    def lap(self, samples: int, passes: int) -> Sample | None:
        """The iteration before, or None at the first."""
        self._closed = (samples, passes)
        if self._previous is None:
            return None
        samples, passes, pairs = self._previous
        return Sample(samples=samples / passes, compute_seconds=_seconds(pairs) / passes)

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


def _seconds(pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    for _, end in pairs:
        end.synchronize()
    return float(sum(begin.elapsed_time(end) for begin, end in pairs)) / 1000.0
