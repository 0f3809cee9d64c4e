"""Records how busy, full and hot a worker's GPU is, beside its iterations, where NVML (nvidia-ml-py) tells it."""

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any, Self, final

from evenstep.telemetry.events import DeviceSampled, Event, IterationDone
from evenstep.telemetry.recorder import Recorder


@final
class WithDevice:
    """Passes every event on, and adds the state of the GPU after an iteration, at most once a second.

    Args:
        recorder: Keeps the events.
        nvml: The module `pynvml`, initialised.
        handle: NVML's handle of the GPU.
        clock: In seconds.
    """

    def __init__(self, recorder: Recorder, nvml: ModuleType, handle: Any, clock: Callable[[], float]) -> None:  # noqa: ANN401 - NVML's own
        self._recorder, self._nvml, self._handle, self._clock = recorder, nvml, handle, clock
        self._due = 0.0

    @classmethod
    def of(cls, recorder: Recorder, device: str, clock: Callable[[], float]) -> Self | Recorder:
        """The recorder with the state of this device, as the agreement names it; without NVML or a GPU as it is."""
        if not device.startswith("GPU-"):
            return recorder
        try:
            nvml = import_module("pynvml")
        except ImportError:
            return recorder
        with suppress(nvml.NVMLError):
            nvml.nvmlInit()
            return cls(recorder, nvml, nvml.nvmlDeviceGetHandleByUUID(device), clock)
        return recorder

    def record(self, event: Event) -> None:
        """Keep one event, and after an iteration the state of the GPU if it is due."""
        self._recorder.record(event)
        if isinstance(event, IterationDone) and self._clock() >= self._due:
            now = self._clock()
            self._due = now + 1.0  # NVML itself averages over up to a second.
            nvml, handle = self._nvml, self._handle
            with suppress(nvml.NVMLError):  # Not every GPU tells everything.
                self._recorder.record(
                    DeviceSampled(
                        worker=event.worker,
                        at=now,
                        utilisation=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
                        memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).used,
                        celsius=nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
                    )
                )

    def close(self) -> None:
        """No more events follow."""
        self._recorder.close()
