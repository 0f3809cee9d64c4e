"""One worker's part of an iteration: what it computes on, in which pieces, and how much its gradient counts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol, final

from evenstep.core.samples.per_sample import PerSample
from evenstep.core.values import IntArray

_FEW: Final = 64


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One worker's part of one iteration.

    Attributes:
        positions: what it computes on. With `samples` = 0 they are a copy of another worker's sample, to be weighted 0,
            because a backward must still take place; with fewer than the minimum, its own repeat. `session.shares`
            hands out an int64 array of them.
        samples: how many of the positions count.
        sizes: every worker's real count, int64 of shape [workers]; they sum to the slice exactly.
        ends_epoch: whether it is the last iteration of the epoch.
        cost: how many average samples of the dataset cost as much as the positions; None if `cost` was not given.
        padding: what of the cost is padding, in average samples; None if batches are not padded.
        loads: what all workers' positions cost, for evenstep's own use; None if `cost` was not given.
    """

    iteration: int
    positions: tuple[int, ...]
    samples: int
    sizes: IntArray
    ends_epoch: bool = False
    cost: float | None = None
    padding: float | None = None
    loads: "Loads | None" = None


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loads:
    """What the shares of all workers cost.

    Attributes:
        costs: in thousandths of an average sample, int64 of shape [workers]; 0 if samples are repeated or copies.
        per_sample: learns what samples take beside their cost.
    """

    costs: IntArray
    per_sample: PerSample


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Positions of one iteration to fetch.

    Attributes:
        positions: which.
        whole: whether they are those of the share and in their order. If the share changes, all of it is asked for
            again.
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
        """Take the sizes as they are decided now, before the next `share`."""

    def share(self) -> Share | None:
        """The share to compute on now; None when the epoch is over. May wait for other workers."""

    def advance(self) -> None:
        """The share has been handed out."""

    def request(self, limit: int | None, *, whole: bool = False) -> Request | None:
        """What to fetch next, at most `limit` positions; None when all known are asked for.

        `whole`: shares had better be fetched whole, as nothing can be made of parts of what is fetched.
        """


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """A piece of a share: `positions`, of which `samples` are this worker's own (else 0).

    `portion` is its part of the worker's share, 0 to 1; `first` and `last` give its place in the iteration. `cost` and
    `padding` are as those of a share.
    """

    positions: tuple[int, ...]
    samples: int
    portion: float
    first: bool
    last: bool
    cost: float | None = None
    padding: float | None = None


def whole_batch(share: Share) -> MicroBatch:
    """The share in one piece."""
    return MicroBatch(
        positions=share.positions,
        samples=share.samples,
        portion=1.0,
        first=True,
        last=True,
        cost=share.cost,
        padding=share.padding,
    )


def micro_batches(share: Share, size: int | None) -> list[MicroBatch]:
    """The share in pieces of `size` positions, the last one shorter if they do not divide; None: in one piece.

    A last piece of one position, which many models cannot compute on, has it twice.

    >>> import numpy as np
    >>> share = Share(iteration=0, positions=(3, 4, 5, 6, 7), samples=5, sizes=np.array([5, 7]))
    >>> [(piece.positions, piece.portion) for piece in micro_batches(share, 2)]
    [((3, 4), 0.4), ((5, 6), 0.4), ((7, 7), 0.2)]
    """
    whole, step = len(share.positions), size
    if step is None:
        return [whole_batch(share)]
    return [
        MicroBatch(
            positions=share.positions[start : start + step] * (2 if start and start + 1 == whole and step > 1 else 1),
            samples=min(max(share.samples - start, 0), step),
            portion=min(step, whole - start) / whole,
            first=start == 0,
            last=start + step >= whole,
        )
        for start in range(0, whole, step)
    ]


def ends_period(share: Share, period: int) -> bool:
    """Whether an average follows this iteration: every `period`-th one of an epoch, and the epoch's last.

    Counted within the epoch, so that a resumed run averages in the same iterations.
    """
    return (share.iteration + 1) % period == 0 or share.ends_epoch


def by_samples(share: Share) -> float:
    """x_i / X: the sum over all workers is then the gradient of the union batch (LB-BSP, arXiv 1806.02508)."""
    sizes = share.sizes
    # NumPy takes a microsecond for the sum of a few numbers, and this is once an iteration.
    return share.samples / (sum(sizes.tolist()) if len(sizes) < _FEW else int(sizes.sum()))


def alike(share: Share) -> float:
    """1 / n for the n workers that have samples, whatever their sizes: DBS as of the time of its paper."""
    return 1 / int((share.sizes > 0).sum()) if share.samples else 0.0


WEIGHTINGS: Final[Mapping[str, Callable[[Share], float]]] = MappingProxyType({"samples": by_samples, "mean": alike})
"""The weightings by the names that schemes use."""
