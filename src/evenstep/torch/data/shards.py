"""Data that is read as streams, a shard at a time, in the map-style form that lets workers take uneven parts of it."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, final

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from evenstep.core.errors import ConfigError

ShardT = TypeVar("ShardT")


@final
class ShardedDataset(Dataset[Any], Generic[ShardT]):
    """The samples of many shards (files, say), of which each process reads those shards that its samples lie in.

    Workers whose batches change size cannot each iterate over a stream of their own: who had how much of it would be
    settled by whoever reads faster, and nobody could resume. Here sample i has a place, in one shard, and counts once.
    A process that needs one sample of a shard reads that shard whole and keeps it, so shards should fit into memory
    `keep` times per process; with `shuffle=True` evenstep shuffles the shards, and the samples inside each.

    Args:
        shards: What `read` takes, one for each shard; a path, usually.
        lengths: How many samples each shard has.
        read: Opens a shard and iterates over its samples, in the same order every time.
        transform: What is done to a sample when it is used (decoding, augmentation); it may draw random numbers.
        keep: How many shards a process keeps, at least 1: two, where batches reach over the end of one.

    Raises:
        ConfigError: The numbers of shards and lengths differ, or a number is out of range.
    """

    def __init__(
        self,
        shards: Sequence[ShardT],
        lengths: Sequence[int],
        read: Callable[[ShardT], Iterable[Any]],
        *,
        transform: Callable[[Any], Any] | None = None,
        keep: int = 2,
    ) -> None:
        if len(shards) != len(lengths):
            raise ConfigError(f"there are {len(shards)} shards but {len(lengths)} lengths: give each shard its length")
        if min(lengths, default=0) < 0 or keep < 1:
            raise ConfigError("shards have lengths of at least 0, and at least one is kept: mend lengths or keep")
        self.shards = shards
        self.lengths = tuple(lengths)
        self._read = read
        self._transform = transform
        self._keep = keep
        self._ends = np.cumsum(np.array(lengths, dtype=np.int64))
        self._kept: OrderedDict[int, list[Any]] = OrderedDict()

    def __len__(self) -> int:
        """How many samples all shards have."""
        return sum(self.lengths)

    def __getitem__(self, index: int) -> Any:
        """The sample, by its place in all shards put together.

        Raises:
            ConfigError: Its shard did not have as many samples as its length says.
        """
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._ends, index, side="right"))
        sample = self._shard(number)[index - int(self._ends[number])]  # From the end of the shard.
        return sample if self._transform is None else self._transform(sample)

    def _shard(self, number: int) -> list[Any]:
        if number not in self._kept:
            samples = list(self._read(self.shards[number]))
            if len(samples) != self.lengths[number]:
                raise ConfigError(
                    f"shard {self.shards[number]!r} has {len(samples)} samples where its length says"
                    f" {self.lengths[number]}: mend lengths"
                )
            while len(self._kept) >= self._keep:
                self._kept.popitem(last=False)
            self._kept[number] = samples
        self._kept.move_to_end(number)
        return self._kept[number]

    def __getstate__(self) -> dict[str, Any]:
        """Without the shards that are kept, for data workers of another process."""
        return {**self.__dict__, "_kept": OrderedDict()}


@final
class ShardedShuffle(Sampler[int]):
    """The shards in random order, and the samples inside each; drawn from torch's global generator."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        """How many samples all shards have."""
        return sum(self._lengths)

    def __iter__(self) -> Iterator[int]:
        begins = np.cumsum([0, *self._lengths]).tolist()
        for shard in torch.randperm(len(self._lengths)).tolist():
            yield from (begins[shard] + torch.randperm(self._lengths[shard])).tolist()
