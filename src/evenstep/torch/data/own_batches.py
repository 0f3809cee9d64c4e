"""Shares of an epoch for loops that make their own batches."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, cast, final

import numpy as np
from torch.utils.data import DataLoader

from evenstep.core.samples import Drawn, Share, Shares
from evenstep.core.values import UNLIMITED, require_whole
from evenstep.torch.data.batches import Batches
from evenstep.torch.data.loop import Maker
from evenstep.torch.data.sampling import MAX_LENGTH, Positions

if TYPE_CHECKING:
    from evenstep.torch.session import Session


@final
class PreparedShares(Batches):
    """Iterates over this worker's `Share` of each iteration, with positions as int64 arrays; a loop is an epoch.

    Everything else works as with a loader: sizes follow the workers' speeds, `model` and `optimizer` weigh by them,
    and there are `set_epoch`, `state_dict`, `note`, `mean_over_workers`, `computes(share)` and so on.

    Args:
        length: The positions of an epoch, numbered from 0; None if it never ends.
        global_batch_size: Positions in one iteration, over all workers.
        session: The session.
        number: The number of this loader in the session.
        cost: As in `Session.shares`.

    Raises:
        ConfigError: A number is not an integer, or is out of range.
    """

    def __init__(
        self, length: int | None, global_batch_size: int, session: "Session", number: int, cost: object = None
    ) -> None:
        length = MAX_LENGTH if length is None else require_whole("length", length, 1, MAX_LENGTH)
        size = require_whole("global_batch_size", global_batch_size, 1, UNLIMITED)
        super().__init__(DataLoader(Positions(length), batch_size=size), session, number, cost)

    def __iter__(self) -> Iterator[Share]:
        return cast("Iterator[Share]", super().__iter__())

    def __len__(self) -> int:
        """Iterations in an epoch, the same on every worker.

        Raises:
            TypeError: The epoch never ends.
        """
        if len(self.source.dataset) == MAX_LENGTH:  # type: ignore[arg-type]
            raise TypeError("shares without a length never end")
        return super().__len__()

    def _let_go(self) -> None:
        """Nothing is fetched ahead."""

    def _maker(self, shares: Shares, drawn: Drawn) -> Maker:
        return _part


def _part(share: Share, piece: Share) -> Share:
    """This part of the share, with positions as an array that can index data."""
    positions = cast("tuple[int, ...]", np.array(piece.positions, dtype=np.int64))
    return replace(share, positions=positions, samples=piece.samples)
