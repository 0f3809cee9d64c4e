"""One worker's part of an iteration: its positions, their division into pieces, and the weight of its gradient."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol, final

from evenstep.core.samples.per_sample import PerSample
from evenstep.core.values import IntArray


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One worker's part of one iteration.

    Attributes:
        positions: the positions to compute on. With `samples` = 0 they are a copy of another worker's sample, to be
            weighted 0, because a backward must still take place; with fewer than the minimum, its own repeat.
            `session.shares` hands out an int64 array of them.
        samples: the number of positions that count.
        sizes: every worker's real count, int64 of shape [workers]; they sum to the slice exactly.
        ends_epoch: whether it is the last iteration of the epoch.
        cost: the cost of the positions, in average samples of the dataset; None if `cost` was not given.
        padding: the part of the cost that is padding, in average samples; None if batches are not padded.
        loads: the costs of all workers' positions, for evenstep's own use; None if `cost` was not given.
        portion: the part of the worker's positions that these are, 0 to 1; below 1 if they are a micro-batch.
        first: whether no micro-batch of the iteration precedes it.
        last: whether none follows it.
    """

    iteration: int
    positions: tuple[int, ...]
    samples: int
    sizes: IntArray
    ends_epoch: bool = False
    cost: float | None = None
    padding: float | None = None
    loads: "Loads | None" = None
    portion: float = 1.0
    first: bool = True
    last: bool = True


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loads:
    """The costs of all workers' shares.

    Attributes:
        costs: in thousandths of an average sample, int64 of shape [workers]; 0 if samples are repeated or copies.
        per_sample: learns the time that samples take besides their cost.
    """

    costs: IntArray
    per_sample: PerSample


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Positions of one iteration to fetch.

    Attributes:
        positions: the positions.
        whole: whether they are all of the share's, in order. If the share changes, all of it is requested again.
    """

    iteration: int
    positions: tuple[int, ...]
    whole: bool = False


class Shares(Protocol):
    """One worker's shares of an epoch, one after another.

    Attributes:
        misses: positions that a change of sizes made this worker fetch out of turn.
    """

    misses: int

    def replan(self) -> None:
        """Adopt the sizes as currently decided, before the next `share`."""

    def share(self) -> Share | None:
        """The share to compute on now; None when the epoch is over. May wait for other workers."""

    def advance(self) -> None:
        """The share has been handed out."""

    def request(self, limit: int | None, *, whole: bool = False) -> Request | None:
        """The next positions to fetch, at most `limit`; None when all known ones have been requested.

        `whole`: prefer to fetch shares whole, because parts of what was fetched cannot be used.
        """


def by_samples(share: Share) -> float:
    """x_i / X: the sum over all workers is then the gradient of the union batch (LB-BSP, arXiv 1806.02508)."""
    sizes = share.sizes
    # For a few numbers NumPy's sum takes a microsecond, and this runs in every iteration.
    return share.samples / (sum(sizes.tolist()) if len(sizes) < 64 else int(sizes.sum()))


def alike(share: Share) -> float:
    """1 / n for the n workers that have samples, whatever their sizes: DBS at the time of its paper."""
    return 1 / int((share.sizes > 0).sum()) if share.samples else 0.0


WEIGHTINGS: Final[Mapping[str, Callable[[Share], float]]] = MappingProxyType({"samples": by_samples, "mean": alike})
"""The weightings by the names that schemes use."""
