"""The memory of an emulated device."""

from dataclasses import dataclass
from typing import final

from evenstep.core.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """A memory of `capacity_bytes` in which a batch takes `fixed_bytes` and `bytes_per_sample` for each of its samples.

    Raises:
        ConfigError: Not even one sample fits, or a number is out of range.
    """

    capacity_bytes: int
    fixed_bytes: int
    bytes_per_sample: int

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        if self.fixed_bytes < 0 or self.bytes_per_sample < 1:
            raise ConfigError("memory_per_sample must be at least 1 byte and memory_fixed at least 0")
        if self.largest_batch < 1:
            raise ConfigError(
                f"a memory of {self.capacity_bytes} bytes holds no sample: raise memory, or lower memory_fixed or"
                " memory_per_sample"
            )

    def peak_bytes(self, batch_size: int) -> int:
        """What a batch of that size takes."""
        return self.fixed_bytes + self.bytes_per_sample * batch_size

    @property
    def largest_batch(self) -> int:
        """The samples that fit."""
        return (self.capacity_bytes - self.fixed_bytes) // self.bytes_per_sample
