"""Makes batches of the user's dataset, with the same random numbers in each, whichever process makes it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, final

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate, collate_int_fn, collate_tensor_fn, default_collate_fn_map

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.torch.data.packing import is_small, pack
from evenstep.torch.data.randomness import Generators

Collate: TypeAlias = Callable[[Any], Any]
Made = TypeVar("Made")
Addresses: TypeAlias = tuple[int, Sequence[int], list[int]]
"""An epoch, positions in it, and their indices in the dataset."""


@final
class BatchMaker:
    """Fetches samples and collates them.

    A sample's random numbers derive from seed, epoch and position, and those of the collate function from seed, epoch
    and the first position. So an augmentation does not depend on the worker, or the process, that computes it. Seeding
    takes longer than many a sample, so a generator is seeded only once something has drawn from it. That batch is made
    once more, so what it gets never depends on which batch was the first to draw. The script's own random numbers do
    not move.

    Attributes:
        dataset: The user's dataset.
        by_rows: Whether rows of one batch can be put into another, since nothing but `default_collate` made it.
    """

    def __init__(self, dataset: Dataset[Any], seed: int, collate: Collate = default_collate) -> None:
        self.dataset: Final[Any] = dataset
        self.by_rows: Final = collate is default_collate
        self._seed = seed
        self._collate = collate
        self._make = _default_collate() if self.by_rows else collate
        self._of_tensors = self.by_rows and _is_of_tensors(dataset)
        self._generators = Generators()
        self._seeded: set[int] = set()
        """The generators that something has drawn from."""

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchMaker, (self.dataset, self._seed, self._collate)

    def batch(self, addresses: Addresses) -> Any:
        """The collated batch of these addresses."""
        if self._of_tensors:
            return _rows_of(self.dataset, torch.tensor(addresses[2]))
        return self._settled(lambda: self._collated(addresses, self._samples(addresses)))

    def packed(self, addresses: Addresses) -> bytes:
        """The samples of these addresses, of which `collated` makes a batch after `pickle.loads`."""
        return self._settled(lambda: pack(_listed(self._samples(addresses))))

    def collated(self, epoch: int, positions: Sequence[int], samples: list[Any]) -> Any:
        """The batch of these samples, as `batch` collates it."""
        return self._settled(lambda: self._collated((epoch, positions, []), samples))

    def _settled(self, make: Callable[[], Made]) -> Made:
        """What `make` returns with every generator seeded that it draws from; they are put back."""
        generators, before, untouched = self._generators, self._generators.states(), False
        try:
            made = make()
            while moved := generators.moved(before) - self._seeded:
                self._seeded |= moved
                made = make()
            untouched = not self._seeded
            return made
        finally:
            if not untouched:
                generators.restore(before)

    def _samples(self, addresses: Addresses) -> Any:
        epoch, positions, indices = addresses
        if not self._seeded:
            return self._fetched(indices)
        samples: list[Any] = []
        for position, index in zip(positions, indices, strict=True):
            self._generators.seed(self._seeded, self._seed, epoch, position)
            samples += _listed(self._fetched([index]))
        return samples

    def _fetched(self, indices: list[int]) -> Any:
        dataset = self.dataset
        if callable(fetch := getattr(dataset, "__getitems__", None)):
            return fetch(indices)
        return [dataset[index] for index in indices]

    def _collated(self, addresses: Addresses, samples: Any) -> Any:
        epoch, positions, _ = addresses
        if self._seeded:
            self._generators.seed(self._seeded, self._seed, epoch, -1 - positions[0])
        return self._make(samples)


def _default_collate() -> Collate:
    """As `default_collate`, with fewer questions about each field; also where its map has been extended."""
    known = default_collate_fn_map
    quicker: dict[Any, Any] = {each: ours for each, (theirs, ours) in _QUICKER.items() if known.get(each) is theirs}
    rest = partial(collate, collate_fn_map={**known, **quicker})
    plain = [kind for kind in (tuple, dict) if not any(isinstance(kind(), each) for each in known)]

    def make(batch: Any) -> Any:
        kind = type(batch[0])
        if kind in quicker:
            return quicker[kind](batch)
        if kind not in plain:
            return rest(batch)
        if kind is dict:
            return {name: make([each[name] for each in batch]) for name in batch[0]}
        try:
            fields = list(zip(*batch, strict=True))
        except ValueError:
            return rest(batch)  # Which says that they differ in length.
        return [make(field) for field in fields]

    return make


def _stacked(batch: Any, **options: Any) -> Any:
    """Without the shared memory that a data worker takes, for what is sent by value."""
    return torch.stack(batch) if is_small(batch[0], len(batch)) else collate_tensor_fn(batch, **options)


def _whole_numbers(batch: Any, **_: object) -> torch.Tensor:
    """What `torch.tensor` makes of whole numbers, such as labels, in less than half of its time."""
    array = np.array(batch)
    return torch.from_numpy(array).clone() if array.dtype == np.int64 else torch.tensor(batch)


_QUICKER: Final = {int: (collate_int_fn, _whole_numbers), torch.Tensor: (collate_tensor_fn, _stacked)}
"""Of default_collate's functions, by type, those that have a quicker equal here."""


def _listed(samples: Any) -> list[Any]:
    if not isinstance(samples, list | tuple):
        raise ConfigError(
            f"the dataset's __getitems__ returned {shown(samples)}, and its samples are needed one by one, as batches"
            " change their sizes or samples draw random numbers: return a list of samples"
        )
    return list(samples)


def _is_of_tensors(dataset: Any) -> bool:
    """Whether its samples are rows of tensors."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset


def _rows_of(dataset: Any, indices: torch.Tensor) -> list[torch.Tensor]:
    """What default_collate makes of these samples of a TensorDataset, without a call per sample."""
    while isinstance(dataset, Subset):
        indices = torch.as_tensor(dataset.indices)[indices]
        dataset = dataset.dataset
    assert isinstance(dataset, TensorDataset)
    return [tensor[indices] for tensor in dataset.tensors]
