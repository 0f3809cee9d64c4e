"""A device whose time is a straight line in the batch size, with a flat start."""

from dataclasses import dataclass
from typing import final

from evenstep.cluster.slowness.require import require_at_least
from evenstep.core.errors import ConfigError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AffineCurve:
    """`fixed_seconds` + max(batch size, `flat_size`) * `seconds_per_sample`.

    Attributes:
        fixed_seconds: The part that no batch size saves, >= 0.
        seconds_per_sample: >= 0.
        flat_size: Samples up to which the device is not filled and the time does not grow, >= 0.

    Raises:
        ConfigError: A value lies outside its range, or an iteration could take no time at all.

    >>> AffineCurve(fixed_seconds=0.25, seconds_per_sample=0.5, flat_size=8).seconds(2)
    4.25
    """

    fixed_seconds: float = 0.0
    seconds_per_sample: float
    flat_size: int = 0

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        require_at_least("fixed_seconds", self.fixed_seconds, 0)
        require_at_least("seconds_per_sample", self.seconds_per_sample, 0)
        require_at_least("flat_size", self.flat_size, 0)
        if self.seconds(1) <= 0:
            raise ConfigError("fixed_seconds and seconds_per_sample must not both be 0")

    def seconds(self, batch_size: int) -> float:
        """The seconds of one iteration with `batch_size` samples, from 0."""
        return self.fixed_seconds + max(batch_size, self.flat_size) * self.seconds_per_sample
