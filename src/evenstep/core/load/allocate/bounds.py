"""The limits of an allocation, counted in multiples; refuses what no allocation can satisfy."""

from dataclasses import dataclass
from typing import Self, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.values import IntArray


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bounds:
    """Limits in units of `multiple` samples: sum = `units`, `lower` <= size <= `upper`, both int64 of shape [workers].

    `upper` is never more than `units`, so that products of it stay within 64 bits.
    """

    units: int
    lower: IntArray
    upper: IntArray
    multiple: int

    @classmethod
    def of(cls, total: int, lower: IntArray, upper: IntArray, multiple: int) -> Self:
        """From limits in samples: lower limits are rounded up to the multiple, upper limits down.

        Raises:
            ConfigError: where no sizes satisfy the limits; the message names the limit to change.
        """
        if multiple < 1:
            raise ConfigError(f"sizes cannot be multiples of {multiple}: use a multiple of at least 1")
        if total % multiple:
            raise ConfigError(
                f"the global batch of {total} samples is not a multiple of {multiple}: change one of the two"
            )
        units, least, most = total, lower, upper
        if multiple > 1:
            units, least, most = total // multiple, -(-lower // multiple), upper // multiple
        least, most = np.maximum(least, 0), np.minimum(most, units)
        if (needed := int(least.sum())) > units:
            raise ConfigError(
                f"{len(least)} workers need at least {needed * multiple} samples together, more than the global batch "
                f"of {total}: lower the minimum sizes or raise the global batch size"
            )
        if (possible := int(most.sum())) < units:
            raise ConfigError(
                f"{len(most)} workers can take at most {possible * multiple} samples together, fewer than the global "
                f"batch of {total}: raise the maximum sizes or lower the global batch size"
            )
        if (least > most).any():
            worker = int(np.argmax(least > most))
            raise ConfigError(
                f"worker {worker} has no size between {int(lower[worker])} and {int(upper[worker])} that is a multiple "
                f"of {multiple}: widen its limits or lower the multiple"
            )
        return cls(units=units, lower=least, upper=most, multiple=multiple)
