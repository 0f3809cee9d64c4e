"""The emulated device: another machine's speed and memory, whatever the real one is."""

from dataclasses import dataclass
from typing import final

from evenstep.cluster.slowness.base import Curve
from evenstep.cluster.slowness.device_memory import DeviceMemory
from evenstep.cluster.slowness.slowness import NO_SLOWNESS, Slowness
from evenstep.core.errors import ConfigError
from evenstep.core.values import UNLIMITED


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device that takes what `curve` says for a batch, instead of the natural seconds.

    Attributes:
        curve: Seconds as a function of the batch size.
        largest_batch: The samples that its memory holds, from 1 to UNLIMITED. It is a fact for those who decide on
            batch sizes; a larger batch is not refused here, and takes what the curve says.
        memory: A memory whose limit nobody is told: it is learnt from what the batches take.

    Raises:
        ConfigError: `largest_batch` lies outside its range.
    """

    curve: Curve
    largest_batch: int = UNLIMITED
    memory: DeviceMemory | None = None

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        if not 1 <= self.largest_batch <= UNLIMITED:
            raise ConfigError(f"largest_batch must lie between 1 and {UNLIMITED}, not {self.largest_batch!r}")

    def seconds(self, *, worker: int, iteration: int, batch_size: int, natural_seconds: float, now: float) -> float:
        """The device's seconds for this batch size."""
        return self.curve.seconds(batch_size)

    def slowness(self, before: Slowness, *, worker: int, iteration: int) -> Slowness:
        """None: a device takes its time, whatever was before it."""
        return NO_SLOWNESS
