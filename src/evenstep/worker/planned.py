"""What a worker behind a barrier computes on: its part of each slice, as the sizes are planned."""

from collections.abc import Callable
from typing import final

from evenstep.core.samples import CostSharing, Ledger, Lookahead, Request, Share
from evenstep.core.values import IntArray


@final
class PlannedShares:
    """A `Lookahead` that follows the sizes as they are decided."""

    def __init__(
        self,
        ledger: Ledger,
        sizes: Callable[[], IntArray],
        *,
        worker: int,
        depth: int,
        minimum: int,
        sharing: CostSharing | None = None,
    ) -> None:
        self._sizes = sizes
        self._lookahead = Lookahead(ledger, worker=worker, sizes=sizes(), depth=depth, minimum=minimum, sharing=sharing)
        self.misses = 0

    def replan(self) -> None:
        self._lookahead.resize(self._sizes())
        self.misses = self._lookahead.misses

    def share(self) -> Share | None:
        return self._lookahead.share()

    def advance(self) -> None:
        self._lookahead.advance()

    def request(self, limit: int | None, *, whole: bool = False) -> Request | None:
        return self._lookahead.request(limit, whole=whole)
