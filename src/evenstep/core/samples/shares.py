"""Where a loader finds what its worker computes on; nothing else."""

from typing import Protocol

from evenstep.core.samples.lookahead import Share


class Shares(Protocol):
    """One worker's shares of an epoch, one after another.

    Attributes:
        misses: Positions that a change of sizes made this worker fetch out of turn.
    """

    misses: int

    def replan(self) -> None:
        """Heed the sizes as they are decided now, before the next `share`."""

    def share(self) -> Share | None:
        """The share to compute on now; None when the epoch is over. May wait for other workers."""

    def advance(self) -> None:
        """The share has been handed out."""

    def request(self, limit: int) -> tuple[int, tuple[int, ...]] | None:
        """An iteration and positions of it to fetch next, at most `limit`; None when all known are asked for."""
