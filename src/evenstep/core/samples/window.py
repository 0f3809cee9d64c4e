"""Decides on which micro-batches a script's optimizer steps, and finds scripts that count them by themselves."""

from dataclasses import dataclass, field
from typing import final

from evenstep.core.errors import ConfigError
from evenstep.core.samples.share import Share

_COUNTS = (
    "the optimizer is stepped after a number of batches that the script counts, and workers compute different numbers"
    " of them: step under `if loader.synchronises:` instead, or in every pass, since a step does nothing in between"
)


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
    _stepped: bool = field(init=False, default=False)

    def begins(self, piece: Share) -> None:
        """Note that a micro-batch begins."""
        if piece.first:
            self._index, self._requested, self._skipped, self._stepped = 0, -1, False, False
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
        self._stepped = piece.last
        return piece.last

    def accumulating(self, piece: Share) -> bool:
        """True if gradients wait for more micro-batches and a step."""
        return not self._stepped and (not piece.first or self._requested >= 0)
