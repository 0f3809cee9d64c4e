"""The order of an epoch's samples: position p of epoch e is dataset index `order(e)[p]` on every worker."""

import zlib
from array import array
from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from operator import index
from typing import Any, Final, cast, final

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from evenstep.core.disagreement import require_agreement
from evenstep.core.errors import ConfigError
from evenstep.core.samples import Drawn
from evenstep.core.shown import shown
from evenstep.core.values import IntArray
from evenstep.torch.data.randomness import mixed, seeded_randomness
from evenstep.torch.data.sampling import MAX_LENGTH, Sampling, copied
from evenstep.torch.data.shards import ShardedDataset, ShardedShuffle
from evenstep.torch.processes.workers import Workers
from evenstep.worker.agreement import DRAWN, Exchange, tell

_PIECE: Final = 2**16
"""The samples in one piece of a draw with replacement."""

_MAX_DRAWN: Final = 2**28
"""The most samples that the user's own sampler may give in an epoch; each worker keeps all of their indices."""


@final
class PiecewiseIndices:
    """Indices that are drawn in pieces of `length` when they are looked up; the latest pieces are kept.

    A piece depends only on its number. So all workers draw the same, in any order, and an epoch may have any length.
    """

    def __init__(self, draw: Callable[[int], torch.Tensor], length: int) -> None:
        self._length = length
        self._piece = lru_cache(maxsize=4)(lambda number: draw(number).numpy())

    def __getitem__(self, positions: IntArray, /) -> IntArray:
        numbers, places = np.divmod(positions, self._length)
        indices = np.empty_like(positions)
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            indices[chosen] = self._piece(number)[places[chosen]]
        return indices


@final
class InOrder:
    """Maps each position to itself, for an epoch of any length."""

    def __getitem__(self, positions: IntArray, /) -> IntArray:
        return positions


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOrder:
    """Draws the order of any epoch.

    Shuffling draws `torch.randperm` from a generator seeded with seed + epoch, as `DistributedSampler` does, and
    shuffles the whole dataset before `drop_last` cuts the end off. Slice k of the epoch then has the same samples as
    iteration k of plain DDP. A `RandomSampler` with replacement, or whose length is not its dataset's, is drawn in
    pieces (`pieces`). From the user's own sampler all workers draw once per epoch, and take the order of worker 0. The
    seed is the DistributedSampler's, otherwise the loader's generator's, otherwise the argument of `prepare`.
    """

    length: int
    dataset_length: int
    seed: int
    shuffle: bool
    sampling: Sampling
    sampler: Any | None = None
    pieces: RandomSampler | None = None

    @property
    def endless(self) -> bool:
        """True if the epoch never ends."""
        return self.length == MAX_LENGTH

    def draw(self, epoch: int, workers: Workers, exchange: Exchange) -> Drawn:
        """Draw the samples of the epoch; with the user's own sampler, all workers must draw together.

        Raises:
            ConfigError: The number of samples differs from the sampler's length, or they are not indices.
            DisagreementError: The workers' samplers give different samples.
        """
        if self.sampler is not None:
            return self._drawn(epoch, workers, exchange)
        if self.pieces is not None:
            count, replacement = self.dataset_length, self.pieces.replacement

            def piece(number: int) -> torch.Tensor:
                generator = torch.Generator().manual_seed(mixed(self.seed, epoch, number))
                if replacement:
                    return torch.randint(count, (_PIECE,), generator=generator)
                return torch.randperm(count, generator=generator)

            return Drawn(indices=PiecewiseIndices(piece, _PIECE if replacement else count))
        if not self.shuffle:
            return Drawn(indices=InOrder())
        shuffled = torch.randperm(self.dataset_length, generator=torch.Generator().manual_seed(self.seed + epoch))
        return Drawn(indices=np.asarray(shuffled[: self.length].numpy(), dtype=np.int64))

    def _drawn(self, epoch: int, workers: Workers, exchange: Exchange) -> Drawn:
        # Without a group, every worker draws from the same seed.
        if workers.host_group is None:
            return self._given(epoch)
        # Not only on worker 0, whose order counts: a sampler may begin to give each worker its own part.
        own, records = tell(lambda: (given := self._given(epoch), given.record), exchange)
        require_agreement(records, {"drawn": DRAWN})
        indices, ends = cast("IntArray", own.indices), own.ends
        return Drawn(
            indices=_of_first(indices, len(indices), workers),
            ends=None if ends is None else _of_first(ends, records[0]["lists"], workers),
        )

    def sketch(self, *, in_order: bool) -> str | None:
        """A digest of the user's own sampler's first draw, in any order or in its own; None without such a sampler.

        Workers compare it: a sampler that gives each worker its own part would leave the others out. The order counts
        where workers draw without each other, on servers. A copy draws, so that the sampler itself does not advance.

        Raises:
            ConfigError: As for `draw`.
        """
        if self.sampler is None:
            return None
        drawn = replace(self, sampler=copied(self.sampler))._given(0)
        order = f" in their order {zlib.crc32(cast('IntArray', drawn.indices).tobytes()):08x}" if in_order else ""
        return f"{drawn.record['drawn']}{order}"

    def _given(self, epoch: int) -> Drawn:
        """The sampler's draw in this process."""
        lists, length = self.sampling.lists, len(cast("Sized", self.sampler))
        with seeded_randomness(self.seed, epoch):
            # A sampler that never ends must not fill the memory.
            given = islice(cast("Iterable[Any]", self.sampler), 2 * length + 1)
            drawn = _flat(given) if lists else Drawn(indices=_indices(given))
        count = len(cast("IntArray", drawn.indices if drawn.ends is None else drawn.ends))
        if count > 2 * length or (count != length and not lists):
            raise ConfigError(
                f"the sampler gave {count} {'lists' if lists else 'samples'} where its length says {length}: give it"
                " the right __len__"
            )
        if lists and (not count or drawn.shortest < 1):
            raise ConfigError("the batch sampler gave an empty list, or none at all: leave out empty lists")
        return drawn


def _flat(lists: Iterable[Any]) -> Drawn:
    """The indices of all lists, concatenated, and where each list ends."""
    indices, ends = array("q"), array("q")
    for each in lists:
        if not isinstance(each, Iterable):
            raise ConfigError(f"the batch sampler gave {shown(each)}, not a list of indices of the dataset")
        indices.extend(_indices(each).tolist())
        ends.append(len(indices))
    return Drawn(indices=np.array(indices, dtype=np.int64), ends=np.array(ends, dtype=np.int64))


def _indices(given: Iterable[Any]) -> IntArray:
    try:
        return np.fromiter(map(index, given), dtype=np.int64)
    except TypeError as error:
        raise ConfigError(f"the loader's sampler gives something else than indices of the dataset: {error}") from error


def _of_first(mine: IntArray, count: int, workers: Workers) -> IntArray:
    """Worker 0's array of this length."""
    workers = workers.processes
    values = torch.from_numpy(mine) if workers.rank == 0 else torch.zeros(count, dtype=torch.int64)
    dist.broadcast(values, group_src=0, group=workers.host_group)
    return cast("IntArray", values.numpy())


def order_of(loader: DataLoader[Any], workers: Workers, seed: int) -> EpochOrder:
    """The order in which the loader's sampler draws.

    Raises:
        ConfigError: The sampler has no length or is too long, or was made for another number of workers.
    """
    sampling = Sampling.of(loader)
    sampler = sampling.sampler
    streams = isinstance(loader.dataset, IterableDataset)
    length = MAX_LENGTH if streams else len(cast("Sized", loader.dataset))
    order = EpochOrder(length=length, dataset_length=length, seed=seed, shuffle=False, sampling=sampling)
    if isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
        if sampler.num_replicas != workers.count:
            raise ConfigError(
                f"the DistributedSampler was made for {sampler.num_replicas} workers but there are {workers.count}:"
                " leave out num_replicas and rank"
            )
        whole = length - length % workers.count if sampler.drop_last else length
        return replace(order, length=whole, shuffle=sampler.shuffle, seed=sampler.seed)
    if streams or type(sampler) is SequentialSampler:
        return order
    if type(sampler) is RandomSampler:
        return _random(order, sampler, loader.dataset)
    if not isinstance(sampler, Sized):
        raise ConfigError(f"the loader's sampler {type(sampler).__name__} has no length: give it a __len__")
    if (drawn := len(sampler)) > _MAX_DRAWN:
        raise ConfigError(
            f"the loader's sampler {type(sampler).__name__} has a length of {drawn}, and all of it is drawn at the"
            f" beginning of an epoch: give it a length of at most {_MAX_DRAWN}, or use PyTorch's RandomSampler, which"
            " is drawn in pieces"
        )
    # The number of samples in lists is only known once they are drawn.
    return replace(order, length=length if sampling.lists else drawn, sampler=sampler)


def _random(order: EpochOrder, sampler: RandomSampler, dataset: Any) -> EpochOrder:
    if sampler.generator is not None:
        order = replace(order, seed=sampler.generator.initial_seed())
    if not sampler.replacement and sampler.num_samples == order.length:
        if isinstance(dataset, ShardedDataset):
            return replace(order, sampler=ShardedShuffle(dataset.lengths))
        return replace(order, shuffle=True)
    count = len(sampler.data_source)
    return replace(order, length=sampler.num_samples, dataset_length=count, pieces=sampler)
