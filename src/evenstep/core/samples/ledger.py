"""The exactly-once ledger of an epoch under a barrier: which positions have been handed out, and which come next."""

from typing import Final, final

from evenstep.core.errors import ConfigError
from evenstep.core.values import IntArray


@final
class Ledger:
    """Cuts an epoch of `length` positions into slices of `global_batch_size` and hands each out exactly once.

    It knows nothing about workers, so an epoch may continue with any number of them. The slices never depend on batch
    sizes: with a barrier the sizes change the clock, never the mathematics.

    Args:
        length: Positions in the epoch, at least 1.
        global_batch_size: Positions in a slice, at least 1; the last slice holds what is left.
        drop_last: Leave out a last slice that is shorter than the others.
        iteration: The number of slices handed out already; whoever hands one out counts it.
        ends: The ends of the slices, int64 of shape [slices], if the user's batch sampler made them.
        even: No worker may be without samples: if the last slice would be shorter than the others, it and the one
            before it are divided in the middle. The cut does not depend on the number of workers, so an epoch may still
            continue with another number.

    Raises:
        ConfigError: There is no slice to hand out at all, or a number is out of range.
    """

    def __init__(
        self,
        *,
        length: int,
        global_batch_size: int,
        drop_last: bool = False,
        iteration: int = 0,
        ends: IntArray | None = None,
        even: bool = False,
    ) -> None:
        if length < 1:
            raise ConfigError("the dataset is empty: give one with at least one sample")
        if global_batch_size < 1:
            raise ConfigError(f"the global batch size must be at least 1, not {global_batch_size}")
        if drop_last and length < global_batch_size:
            raise ConfigError(
                f"drop_last leaves nothing of {length} samples at a global batch size of {global_batch_size}:"
                " lower the batch size or set drop_last=False"
            )
        self.length = length
        self.global_batch_size = global_batch_size
        self.even: Final = even
        self.iterations = length // global_batch_size if drop_last else -(-length // global_batch_size)
        self._last = (self.iterations - 1) * global_batch_size
        if even and self.iterations > 1 and length - self._last < global_batch_size:
            self._last = length - (length - self._last + global_batch_size) // 2
        self._ends = None if ends is None else ends.tolist()
        if self._ends is not None:
            self.iterations = len(self._ends)
        if not 0 <= iteration <= self.iterations:
            raise ConfigError(f"iteration {iteration} is outside this epoch of {self.iterations} iterations")
        self.iteration = iteration

    def slice(self, iteration: int) -> range | None:
        """The positions of an iteration's union batch, or None past the last one."""
        if not 0 <= iteration < self.iterations:
            return None
        if self._ends is not None:
            start, stop = self._ends[iteration - 1] if iteration else 0, self._ends[iteration]
        else:
            start = min(iteration * self.global_batch_size, self._last)
            end = self._last if iteration < self.iterations - 1 else self.length
            stop = min(start + self.global_batch_size, end)
        return range(start, stop)
