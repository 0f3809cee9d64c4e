"""Measures the pure compute of a worker whose model is on CUDA, with events in its stream."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import torch

from evenstep.core.values import Sample


class Event(Protocol):
    """What `torch.cuda.Event` does: a mark in a stream, with the time at which the device comes to it."""

    def record(self, stream: Any) -> None:
        """Put it at the present end of the stream."""

    def synchronize(self) -> None:
        """Wait until the device has come to it."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to the other."""


def _cuda_event() -> Event:
    event: Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


@final
class DeviceStopwatch:
    """For models on CUDA: pairs of events on the stream that is current at `restart`, read one iteration late.

    The host launches work and does not wait for it, so its clock tells neither when compute ends nor how long the
    device waits for other workers. An event after the last pair, which the stream reaches when it may go on with what
    all workers have computed, tells the latter.

    The events of the iteration that a lap closes are still ahead of the device; those of the one before have passed in
    all but pathological cases, so reading them does not stall the host.

    Args:
        event: Makes an event.
        stream: The stream that is current.
    """

    lag = 1

    def __init__(
        self, event: Callable[[], Event] = _cuda_event, stream: Callable[[], Any] = torch.cuda.current_stream
    ) -> None:
        self._event = event
        self._current_stream = stream
        self._stream: Any = None
        self._marks = _Marks()
        self._begun: Event | None = None
        self._closed: tuple[int, int] | None = None
        self._previous: tuple[int, int, _Marks] | None = None

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self._begun is not None

    def restart(self) -> None:
        """From zero; a closed iteration becomes the one before."""
        # Whoever pauses may do so in a stream of communication.
        self._stream = self._current_stream()
        if self._closed is not None:
            self._previous = (*self._closed, self._marks)
        self._marks, self._begun, self._closed = _Marks(), None, None

    def run(self) -> None:
        """Mark the present end of the stream as the beginning of a stretch of compute."""
        if self._begun is None:
            self._begun = self._mark()

    def pause(self) -> None:
        """Mark the present end of the stream as the end of that stretch."""
        if self._begun is not None:
            self._marks.stretches.append((self._begun, self._mark()))
            self._marks.synchronised = self._begun = None

    def drop(self) -> None:
        """Stop, and forget the stretch since it was last run."""
        self._begun = None

    def read(self) -> float:
        """Seconds since `restart`; waits for the device."""
        return self._marks.compute_seconds()

    def synchronised(self) -> None:
        """Mark the present end of the stream, which waits there for what all workers have computed."""
        if self._marks.stretches and self._begun is None and self._marks.synchronised is None:
            self._marks.synchronised = self._mark()

    def synchronised_seconds(self) -> float | None:
        """Of the iteration before; None at the first."""
        return None if self._previous is None else self._previous[2].synchronised_seconds()

    def lap(self, samples: int, passes: int) -> Sample | None:
        """The iteration before, or None at the first."""
        self._closed = (samples, passes)
        if self._previous is None:
            return None
        samples, passes, marks = self._previous
        return Sample(samples=samples / passes, compute_seconds=marks.compute_seconds() / passes)

    def _mark(self) -> Event:
        event = self._event()
        event.record(self._stream)
        return event


@dataclass(slots=True)
class _Marks:
    """The events of one iteration: stretches of compute, and when the synchronisation after the last one was over."""

    stretches: list[tuple[Event, Event]] = field(default_factory=list)
    synchronised: Event | None = None

    def compute_seconds(self) -> float:
        return sum((_seconds(begin, end) for begin, end in self.stretches), 0.0)

    def synchronised_seconds(self) -> float:
        return 0.0 if self.synchronised is None else _seconds(self.stretches[-1][1], self.synchronised)


def _seconds(begin: Event, end: Event) -> float:
    end.synchronize()
    return begin.elapsed_time(end) / 1000.0
