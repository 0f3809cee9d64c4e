"""How a user's loader chooses its samples: by a sampler, or in lists of its batch sampler."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Self, final

from torch.utils.data import BatchSampler, DataLoader, Dataset

_MAX_DEPTH: Final = 8

MAX_LENGTH: Final = 2**53
"""Positions of an epoch at most, which no run comes to the end of."""


@final
class Positions(Dataset[int]):
    """The positions of an epoch, for loops that make their own batches; `length` is None if it never ends."""

    def __init__(self, length: int | None) -> None:
        self.endless = length is None
        self._length = MAX_LENGTH if length is None else length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a loader chooses samples.

    Attributes:
        sampler: Gives indices; with `lists`, lists of indices, each of which is the global batch of an iteration.
        batch_size: The samples of one worker; with `lists`, those of the longest list, None if it is not known.
        drop_last: Whether a last global batch that is shorter is left out.
        whole: Whether `batch_size` is that of all workers.
        endless: Whether the epoch never ends.
    """

    sampler: Any
    batch_size: int | None
    drop_last: bool
    lists: bool = False
    whole: bool = False
    endless: bool = False

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Self:
        """That of this loader. PyTorch's own BatchSampler means the same as `sampler` and `batch_size`."""
        given: Any = loader.batch_sampler
        if type(given) is BatchSampler:  # Also PyTorch's own for `batch_size`, whose attributes a script may change.
            own = loader.dataset if isinstance(loader.dataset, Positions) else None
            return cls(
                sampler=given.sampler,
                batch_size=given.batch_size,
                drop_last=given.drop_last,
                whole=own is not None,
                endless=own is not None and own.endless,
            )
        longest = getattr(given, "batch_size", None)
        known = isinstance(longest, int) and longest > 0
        return cls(sampler=given, batch_size=longest if known else None, drop_last=False, lists=True, whole=True)

    def global_batch_size(self, workers: int) -> int | None:
        """The samples of an iteration over all workers; None if it is not known."""
        return self.batch_size if self.whole or self.batch_size is None else self.batch_size * workers

    def chain(self) -> Iterator[Any]:
        """The sampler, the one that it draws from, and so on."""
        each = self.sampler
        for _ in range(_MAX_DEPTH):
            if each is None:
                return
            yield each
            each = getattr(each, "batch_sampler", None) or getattr(each, "sampler", None)

    def epoch(self) -> int | None:
        """The epoch that a script has set on the sampler, or on one that it draws from; None if it keeps none."""
        return next((epoch for each in self.chain() if isinstance(epoch := getattr(each, "epoch", None), int)), None)

    def set_epoch(self, epoch: int) -> None:
        """Pass an epoch that was set on the loader on to the samplers."""
        for each in self.chain():
            if callable(setter := getattr(each, "set_epoch", None)):
                setter(epoch)
