"""Map-style datasets of files that are read whole, which workers can share unevenly."""

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
    """The samples of many shards, such as files; each process reads the shards that contain its samples.

    Workers whose batch sizes change cannot each iterate over a stream: the split of the samples would depend on
    timing, and a run could not be resumed. Here each sample has an index, is in one shard, and counts once. A process
    reads whole shards and keeps the latest `keep` in memory. With `shuffle=True`, evenstep shuffles the order of the
    shards and the samples inside each.

    Args:
        shards: The arguments of `read`, one for each shard; usually paths.
        lengths: How many samples each shard has.
        read: Opens a shard and iterates over its samples, in the same order every time.
        transform: Applied to a sample when it is used (decoding, augmentation); may draw random numbers.
        keep: How many shards a process keeps, at least 1. A batch may reach over the end of a shard: 2 avoids reading
            shards twice.

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
            raise ConfigError("shards have lengths of at least 0, and at least one is kept: correct lengths or keep")
        self.shards = shards
        self.lengths = tuple(lengths)
        self._read = read
        self._transform = transform
        self._keep = keep
        self._ends = np.cumsum(np.array(lengths, dtype=np.int64))
        self._kept: OrderedDict[int, list[Any]] = OrderedDict()

    def __len__(self) -> int:
        """The samples of all shards."""
        return sum(self.lengths)

    def __getitem__(self, index: int) -> Any:
        """The sample of this index, counted through all shards.

        Raises:
            ConfigError: The number of samples in its shard differs from the given length.
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
                    f" {self.lengths[number]}: correct lengths"
                )
            while len(self._kept) >= self._keep:
                self._kept.popitem(last=False)
            self._kept[number] = samples
        self._kept.move_to_end(number)
        return self._kept[number]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the shards in memory, for data workers."""
        return {**self.__dict__, "_kept": OrderedDict()}


@final
class ShardedShuffle(Sampler[int]):
    """The shards in random order, and the samples inside each; drawn from torch's global generator."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        """The samples of all shards."""
        return sum(self._lengths)

    def __iter__(self) -> Iterator[int]:
        begins = np.cumsum([0, *self._lengths]).tolist()
        for shard in torch.randperm(len(self._lengths)).tolist():
            yield from (begins[shard] + torch.randperm(self._lengths[shard])).tolist()
