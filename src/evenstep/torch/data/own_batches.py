"""Shares of an epoch, for loops that make their own batches."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, cast, final

import numpy as np
from torch.utils.data import DataLoader

from evenstep.core.errors import ConfigError
from evenstep.core.samples import Drawn, MicroBatch, Share, Shares
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED
from evenstep.torch.data.batches import Batches
from evenstep.torch.data.loop import Maker
from evenstep.torch.data.sampling import MAX_LENGTH, Positions
from evenstep.torch.request import whole_number

if TYPE_CHECKING:
    from evenstep.torch.session import Session


@final
class PreparedShares(Batches):
    """Iterates over this worker's `Share` of each iteration, with int64 arrays as positions; a loop is an epoch.

    Everything else is as with a loader: the sizes follow the workers' speeds, `model` and `optimizer` weigh by them,
    and there are `set_epoch`, `state_dict`, `note`, `mean_over_workers`, `computes(share)` and so on.

    Args:
        length: The positions of an epoch, numbered from 0; None if it never ends.
        global_batch_size: Positions in one iteration, over all workers.
        session: The session.
        number: Which of its loaders this is.
        cost: As in `Session.shares`.

    Raises:
        ConfigError: A number is not whole, or out of range.
    """

    def __init__(
        self, length: int | None, global_batch_size: int, session: "Session", number: int, cost: object = None
    ) -> None:
        if length is not None:
            length = _whole("length", length, MAX_LENGTH)
        size = _whole("global_batch_size", global_batch_size, UNLIMITED)
        self._endless = length is None
        super().__init__(DataLoader(Positions(length), batch_size=size), session, number, cost)

    def __iter__(self) -> Iterator[Share]:
        return cast("Iterator[Share]", super().__iter__())

    def __len__(self) -> int:
        """Iterations in an epoch, the same on every worker.

        Raises:
            TypeError: They never end.
        """
        if self._endless:
            raise TypeError("shares without a length never end")
        return super().__len__()

    def release(self) -> None:
        """Nothing is fetched ahead."""

    def _let_go(self) -> None:
        """Nothing is fetched ahead."""

    def _maker(self, shares: Shares, drawn: Drawn) -> Maker:
        return _part


def _part(share: Share, piece: MicroBatch) -> Share:
    """This part of the share, with its positions as an array, with which data can be indexed."""
    positions = cast("tuple[int, ...]", np.array(piece.positions, dtype=np.int64))
    return replace(share, positions=positions, samples=piece.samples)


def _whole(name: str, value: object, most: int) -> int:
    try:
        return whole_number(value, 1, most)
    except (TypeError, ValueError):
        raise ConfigError(f"the {name} of shares is a whole number from 1 to {most}, not {shown(value)}") from None
