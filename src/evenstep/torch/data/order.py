"""The order of an epoch's samples: position p of epoch e is dataset index `order(e)[p]`, alike on every worker."""

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
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from evenstep.core.errors import ConfigError
from evenstep.core.samples import Drawn
from evenstep.core.shown import shown
from evenstep.core.values import IntArray
from evenstep.torch.data.randomness import mixed, seeded_randomness
from evenstep.torch.data.sampling import Sampling
from evenstep.torch.data.shards import ShardedDataset, ShardedShuffle
from evenstep.torch.data.sketch import unaltered
from evenstep.torch.processes.workers import Workers, gather

_PIECE: Final = 2**16
"""Samples that are drawn at a time with replacement."""

_MAX_DRAWN: Final = 2**28
"""Samples that a sampler of the user's own may give in an epoch; each worker keeps all of their indices."""


@final
class PiecewiseIndices:
    """Indices that are drawn in pieces of `length`, when they are looked up; the latest pieces are kept.

    A piece depends on its number alone. So every worker draws alike, in any order, and an epoch may have any length.
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
    """Each position is its own index, whatever the length of the epoch."""

    def __getitem__(self, positions: IntArray, /) -> IntArray:
        return positions


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOrder:
    """Draws the order of any epoch.

    Shuffling draws `torch.randperm` from a generator seeded with seed + epoch, as `DistributedSampler` does, and
    shuffles the whole dataset before `drop_last` cuts the end off. Slice k of the epoch then has the same samples as
    iteration k of plain DDP. A `RandomSampler` with replacement, or of another length than its dataset, is drawn in
    pieces (`pieces`). A sampler of the user's own is drawn once per epoch, on worker 0, and shared. The seed is the
    DistributedSampler's, or that of the loader's generator, or else the argument of `prepare`.
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
        """Whether the epoch never ends."""
        return self.sampling.endless

    @property
    def kept(self) -> bool:
        """Whether a checkpoint needs the order itself, since the sampler may not draw the same again."""
        return self.sampler is not None

    def draw(self, epoch: int, workers: Workers) -> Drawn:
        """The samples of the epoch; with a sampler of the user's own, all workers must draw together.

        Raises:
            ConfigError: The sampler gave something else than its length says, or no indices.
        """
        if self.sampler is not None:
            return self._drawn(epoch, workers)
        if self.pieces is not None:
            return Drawn(indices=self._in_pieces(epoch, self.pieces))
        if not self.shuffle:
            return Drawn(indices=InOrder())
        shuffled = torch.randperm(self.dataset_length, generator=_generator(self.seed + epoch))
        return Drawn(indices=np.asarray(shuffled[: self.length].numpy(), dtype=np.int64))

    def _in_pieces(self, epoch: int, sampler: RandomSampler) -> PiecewiseIndices:
        count = self.dataset_length
        if sampler.replacement:
            return PiecewiseIndices(
                lambda piece: torch.randint(count, (_PIECE,), generator=_generator(mixed(self.seed, epoch, piece))),
                _PIECE,
            )
        return PiecewiseIndices(
            lambda piece: torch.randperm(count, generator=_generator(mixed(self.seed, epoch, piece))), count
        )

    def _drawn(self, epoch: int, workers: Workers) -> Drawn:
        # Without a group, every worker draws from the same seed.
        if workers.host_group is None:
            return self._given(epoch)
        drawn: Drawn | None = None
        failure: Exception | None = None
        if workers.rank == 0:
            try:
                drawn = self._given(epoch)
            except Exception as error:  # Whatever it is, the others must not wait for this worker.
                failure = error
        return _of_first(drawn, failure, workers)

    def sketch(self) -> str | None:
        """What a sampler of the user's own draws first, whatever the order; None if there is none.

        Workers compare it: a sampler that gives each its own part would leave the others' parts out. What it draws here
        does not count.

        Raises:
            ConfigError: As for `draw`.
        """
        if self.sampler is None:
            return None
        with unaltered(self.sampler):
            indices = cast("IntArray", self._given(0).indices)
        return f"{len(indices)} samples, checksum {zlib.crc32(np.sort(indices).tobytes()):08x}"

    def _given(self, epoch: int) -> Drawn:
        """What the sampler gives in this process."""
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
    """The indices of all lists, one after another, and where each list ends."""
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


def _of_first(drawn: Drawn | None, failure: Exception | None, workers: Workers) -> Drawn:
    """What worker 0 drew, or why it could not."""
    mine: dict[str, Any] = {}
    if drawn is not None:
        ends = None if drawn.ends is None else len(drawn.ends)
        mine = {"samples": len(cast("IntArray", drawn.indices)), "lists": ends}
    elif failure is not None:
        mine = {"error": str(failure) if isinstance(failure, ConfigError) else f"{type(failure).__name__}: {failure}"}
    first = gather(workers, mine)[0]
    if failure is not None:
        raise failure
    if "error" in first:
        raise ConfigError(f"worker 0: {first['error']}")
    indices = _sent(None if drawn is None else drawn.indices, first["samples"], workers)
    if first["lists"] is None:
        return Drawn(indices=indices)
    return Drawn(indices=indices, ends=_sent(None if drawn is None else drawn.ends, first["lists"], workers))


def _sent(mine: Any, count: int, workers: Workers) -> IntArray:
    """The array of worker 0, of this length."""
    values = torch.zeros(count, dtype=torch.int64) if mine is None else torch.from_numpy(mine)
    dist.broadcast(values, group_src=0, group=workers.host_group)
    return cast("IntArray", values.numpy())


def _generator(seed: int) -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


def order_of(loader: DataLoader[Any], workers: Workers, seed: int) -> EpochOrder:
    """The order in which the loader's sampler draws.

    Raises:
        ConfigError: The sampler has no length or is too long, or was made for another number of workers.
    """
    sampling = Sampling.of(loader)
    sampler = sampling.sampler
    length = len(cast("Sized", loader.dataset))
    order = EpochOrder(length=length, dataset_length=length, seed=seed, shuffle=False, sampling=sampling)
    if isinstance(sampler, DistributedSampler) and type(sampler).__iter__ is DistributedSampler.__iter__:
        if sampler.num_replicas != workers.count:
            raise ConfigError(
                f"the DistributedSampler was made for {sampler.num_replicas} workers but there are {workers.count}:"
                " leave out num_replicas and rank"
            )
        whole = length - length % workers.count if sampler.drop_last else length
        return replace(order, length=whole, shuffle=sampler.shuffle, seed=sampler.seed)
    if type(sampler) is SequentialSampler:
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
    # The lists' samples are only known when they are drawn.
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
