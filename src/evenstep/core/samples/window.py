"""Decides on which micro-batches a script's optimizer steps, and finds scripts that count them by themselves."""

from dataclasses import dataclass, field
from typing import final

from evenstep.core.errors import ConfigError
from evenstep.core.samples.share import Share

_COUNTS = (
    "the optimizer is stepped after a number of batches that the script counts, and workers compute different numbers"
    " of them: step under `if loader.synchronises:` instead, or in every pass, since a step does nothing in between"
)


def whole_batches(batch_size: int, accumulation: int) -> bool:
    """True if sizes are finer as numbers of whole batches of a step than as parts of each batch of the workers.

    A step is of `accumulation` batches of `batch_size` samples for each worker: with N workers, N x `accumulation`
    batches can be divided among them, or, in each of `accumulation` passes, N x `batch_size` samples.
    """
    return accumulation > 1 and accumulation >= batch_size


@final
@dataclass(slots=True)
class Window:
    """The requests for steps in the current iteration.

    Attributes:
        asked: Whether the script has read where steps are due.
    """

    asked: bool = False
    _index: int = field(init=False, default=0)  # Of the micro-batch that began last.
    _skipped: bool = field(init=False, default=False)  # Whether one before it passed without a request.
    _requested: int = field(init=False, default=-1)  # Index of the last micro-batch with a request, or -1.

    def begins(self, piece: Share) -> None:
        """Note that a micro-batch begins."""
        if piece.first:
            self._index, self._requested, self._skipped = 0, -1, False
            return
        self._skipped |= self._requested < self._index
        self._index += 1

    def steps(self, piece: Share) -> bool:
        """True if a step that the script requests on the current micro-batch takes place.

        Raises:
            ConfigError: The script counts batches by itself.
        """
        if self._skipped and (not piece.last or (self._requested < 0 and not self.asked)):
            raise ConfigError(_COUNTS)
        self._requested = self._index
        return piece.last
