"""The way in which a user's loader chooses samples: by a sampler, or in lists from its batch sampler."""

import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Self, final

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

_GENERATORS: Final = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_MAX_DEPTH: Final = 8

MAX_LENGTH: Final = 2**53
"""The most positions of an epoch, a number that no run reaches: an epoch of so many never ends."""


@final
class Positions(Dataset[int]):
    """The positions of an epoch, for loops that make their own batches."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The way in which a loader chooses samples.

    Attributes:
        sampler: Gives indices; with `lists`, lists of indices, each the global batch of one iteration.
        batch_size: The samples of one worker; with `lists`, the length of the longest list, None if not known.
        drop_last: Whether a shorter last global batch is left out.
        whole: Whether `batch_size` counts the samples of all workers.
    """

    sampler: Any
    batch_size: int | None
    drop_last: bool
    lists: bool = False
    whole: bool = False

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Self:
        """The sampling of this loader. PyTorch's own BatchSampler is read as `sampler` and `batch_size`."""
        given: Any = loader.batch_sampler
        if type(given) is BatchSampler:  # Also PyTorch's own for `batch_size`; a script may change its attributes.
            return cls(
                sampler=given.sampler,
                batch_size=given.batch_size,
                drop_last=given.drop_last,
                whole=isinstance(loader.dataset, Positions),
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
        """The epoch that a script has set on the sampler, or on one that it draws from; None if there is none."""
        return next((epoch for each in self.chain() if isinstance(epoch := getattr(each, "epoch", None), int)), None)

    def set_epoch(self, epoch: int) -> None:
        """Pass the loader's new epoch on to the samplers."""
        for each in self.chain():
            if callable(setter := getattr(each, "set_epoch", None)):
                setter(epoch)


def copied(sampler: Any, depth: int = _MAX_DEPTH) -> Any:
    """Copy the sampler with its generators and inner samplers, so that drawing from the copy does not change it."""
    attributes = getattr(sampler, "__dict__", None)
    if attributes is None or not depth:
        return sampler
    made = copy.copy(sampler)
    for name, value in attributes.items():
        if isinstance(value, _GENERATORS):
            vars(made)[name] = copy.deepcopy(value)
        elif isinstance(value, Sampler) or name in ("sampler", "batch_sampler"):
            vars(made)[name] = copied(value, depth - 1)
    return made
