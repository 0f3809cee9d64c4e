"""The order of an epoch's samples: position p of epoch e is dataset index `order(e)[p]`, alike on every worker."""

import random
from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import Any, cast, final

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from evenstep.core.errors import ConfigError
from evenstep.core.values import IntArray
from evenstep.torch.data.shards import ShardedDataset, ShardedShuffle
from evenstep.torch.processes.workers import Workers


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOrder:
    """Draws the order of any epoch.

    Shuffling draws `torch.randperm` from a generator seeded with seed + epoch, as `DistributedSampler` does: slice k of
    the epoch is then the very set of samples on which plain DDP would do its iteration k. A sampler of the user's own
    is drawn once per epoch, on worker 0 under a seed of its own, and shared. The seed is the DistributedSampler's, or
    that of the loader's generator, or else the argument of `prepare`. As there, the whole dataset is shuffled before
    drop_last cuts the end off, so that every sample has its turn.
    """

    length: int
    dataset_length: int
    seed: int
    shuffle: bool
    sampler: Any | None = None

    def draw(self, epoch: int, workers: Workers) -> IntArray:
        """The dataset indices of the epoch, int64 of shape [length]; with a sampler, all workers must draw together."""
        if self.sampler is not None:
            return self._drawn(epoch, workers)
        if not self.shuffle:
            return np.arange(self.length, dtype=np.int64)
        generator = torch.Generator()
        generator.manual_seed(self.seed + epoch)
        shuffled = torch.randperm(self.dataset_length, generator=generator)
        return np.asarray(shuffled[: self.length].numpy(), dtype=np.int64)

    def _drawn(self, epoch: int, workers: Workers) -> IntArray:
        indices = torch.zeros(self.length, dtype=torch.int64)
        drawn = self.length
        # Without a group every worker draws for itself, from the same seed.
        if workers.rank == 0 or workers.host_group is None:
            with SeededRandomness(self.seed, epoch):
                order = [int(index) for index in self.sampler or ()]
            drawn = len(order)
            indices[: min(drawn, self.length)] = torch.tensor(order[: self.length], dtype=torch.int64)
        if workers.host_group is not None:
            count = torch.tensor([drawn])
            dist.broadcast(count, 0, group=workers.host_group)
            dist.broadcast(indices, 0, group=workers.host_group)
            drawn = int(count)
        if drawn != self.length:
            raise ConfigError(
                f"the sampler gave {drawn} samples where its length says {self.length}: give it the right __len__"
            )
        return np.asarray(indices.numpy(), dtype=np.int64)


@final
class SeededRandomness:
    """Inside, the generators of Python, NumPy and torch (CPU) start from the key; afterwards they are restored."""

    def __init__(self, *key: int) -> None:
        self._key = key

    def __enter__(self) -> None:
        self._states = (random.getstate(), np.random.get_state(), torch.default_generator.get_state())
        seed_everything(*self._key)

    def __exit__(self, *exception: object) -> None:
        python, numpy, cpu = self._states
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(cpu)


def seed_everything(*key: int) -> None:
    """Seed the global generators of Python, NumPy and torch (CPU) from the key."""
    seed = _mixed(*key)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def _mixed(*key: int) -> int:
    """63 bits that differ for keys that differ: SplitMix64's finaliser over the parts."""
    state = 0
    for part in key:
        state = (state + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def order_of(loader: DataLoader[Any], workers: Workers, seed: int) -> EpochOrder:
    """The order that the loader's sampler stands for.

    Raises:
        ConfigError: The sampler has no length, was made for another number of workers, or is one of those that draw
            each worker's own part in a way that only they know.
    """
    sampler = loader.sampler
    length = len(cast("Sized", loader.dataset))
    order = EpochOrder(length=length, dataset_length=length, seed=seed, shuffle=False)
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
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == length:
        if sampler.generator is not None:
            order = replace(order, seed=sampler.generator.initial_seed())
        if isinstance(loader.dataset, ShardedDataset):
            return replace(order, sampler=ShardedShuffle(loader.dataset.lengths))
        return replace(order, shuffle=True)
    if (getattr(sampler, "num_replicas", None) or 1) > 1:
        raise ConfigError(
            f"the loader's sampler {type(sampler).__name__} gives each worker a part of its own, and evenstep shares"
            " out what all are to have: make it with num_replicas=1 and rank=0"
        )
    if not isinstance(sampler, Sized):
        raise ConfigError(f"the loader's sampler {type(sampler).__name__} has no length: give it a __len__")
    return replace(order, length=len(sampler), sampler=sampler)
