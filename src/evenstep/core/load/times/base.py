"""The interface of a model of time."""

from typing import Protocol

from evenstep.core.values import IntArray


class TimeModels(Protocol):
    """Time as a function of batch size, for all workers at once; monotone in the size. Integers, shape [workers]."""

    def nanoseconds(self, sizes: IntArray) -> IntArray:
        """How long each worker takes for its size."""

    def largest(self, nanoseconds: int) -> IntArray:
        """The largest size that each worker finishes within the given time; may be negative where it finishes none."""
