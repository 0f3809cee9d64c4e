"""Measures a worker whose model is on CUDA: compute with events in the stream, memory through the allocator."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, final

import torch
from torch.cuda import Event

from evenstep.core.memory import ROUNDING_BYTES
from evenstep.core.values import Sample


@final
class CudaMemory:
    """The memory of a CUDA device, from PyTorch's allocator; the allocator's unused cache counts as free.

    It resets the allocator's peak statistics in every iteration, so a script's own reading of them sees one iteration.
    """

    rounding_bytes = ROUNDING_BYTES

    def __init__(self, device: torch.device) -> None:
        free, _ = torch.cuda.mem_get_info(device)
        self._device = device
        self.capacity_bytes = free + torch.cuda.memory_reserved(device)
        self.base_bytes = torch.cuda.memory_allocated(device)

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self, batch_size: int) -> int:
        """The peak once backward has been launched: the host allocates, no matter when the device computes."""
        return torch.cuda.max_memory_allocated(self._device)


_TIMING_EVENT: Final[Callable[[], Event]] = partial(Event, enable_timing=True)


@final
class DeviceStopwatch:
    """A `Stopwatch` made of pairs of events on the stream that is current at `restart`, read one iteration late.

    The host launches work without waiting for it, so its clock shows neither when compute ends nor how long the device
    waits for other workers. The wait is measured by an event after the last pair, which the stream reaches when the
    result of all workers is there. When the lap of an iteration is closed, the device has not reached its events yet,
    but it has nearly always passed those of the iteration before, so reading these does not stall the host.

    Args:
        event: Makes an event.
        stream: Returns the current stream.
    """

    lag = 1

    def __init__(
        self, event: Callable[[], Event] = _TIMING_EVENT, stream: Callable[[], Any] = torch.cuda.current_stream
    ) -> None:
        self._event = event
        self._current_stream = stream
        self._stream: Any = None
        self._marks = _Marks()
        self._began: Event | None = None
        self._closed: tuple[float, int] | None = None
        self._previous: tuple[float, int, _Marks] | None = None

    @property
    def running(self) -> bool:
        return self._began is not None

    def restart(self) -> None:
        # Kept, because a pause may occur while a communication stream is current.
        self._stream = self._current_stream()
        if self._closed is not None:
            self._previous = (*self._closed, self._marks)
        self._marks, self._closed = _Marks(), None
        self._began = self._mark()

    def run(self) -> None:
        if self._began is None:
            self._began = self._mark()

    def pause(self) -> None:
        if self._began is not None:
            self._marks.stretches.append((self._began, self._mark()))
            self._marks.synchronised = self._began = None

    def drop(self) -> None:
        self._began = None

    def read(self) -> float:
        return self._marks.compute_seconds()

    def synchronised(self) -> None:
        """Mark the current end of the stream, where it waits for the result of all workers."""
        if self._marks.stretches and self._began is None and self._marks.synchronised is None:
            self._marks.synchronised = self._mark()

    @property
    def synchronised_seconds(self) -> float | None:
        return None if self._previous is None else self._previous[2].synchronised_seconds()

    def lap(self, samples: float, passes: int) -> Sample | None:
        """Return the previous iteration, or None at the first."""
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
    """The events of one iteration: stretches of compute, and the end of the synchronisation after the last one."""

    stretches: list[tuple[Event, Event]] = field(default_factory=list)
    synchronised: Event | None = None

    def compute_seconds(self) -> float:
        return sum((_seconds(begin, end) for begin, end in self.stretches), 0.0)

    def synchronised_seconds(self) -> float:
        return 0.0 if self.synchronised is None else _seconds(self.stretches[-1][1], self.synchronised)


def _seconds(begin: Event, end: Event) -> float:
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000.0
