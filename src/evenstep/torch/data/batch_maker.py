"""Makes batches of the user's dataset, in this process or in a data worker."""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate, collate_int_fn, collate_tensor_fn, default_collate_fn_map

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.torch.data.packing import is_small, pack

Collate: TypeAlias = Callable[[Any], Any]


@final
class BatchMaker:
    """Fetches samples and collates them.

    Attributes:
        dataset: The user's dataset.
        by_rows: Whether rows of one batch can be put into another, because only `default_collate` made it.
        collated: Makes a batch of samples.
    """

    def __init__(self, dataset: Dataset[Any], collate: Collate = default_collate) -> None:
        self.dataset: Final[Any] = dataset
        self.by_rows: Final = collate is default_collate
        self.collated: Final = _default_collate() if self.by_rows else collate
        self._collate = collate
        inner: Any = dataset
        while type(inner) is Subset:
            inner = inner.dataset
        self._of_tensors = self.by_rows and type(inner) is TensorDataset

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchMaker, (self.dataset, self._collate)

    def batch(self, indices: list[int]) -> Any:
        """The collated batch of the samples with these indices of the dataset."""
        if not self._of_tensors:
            return self.collated(self._fetched(indices))
        # Like default_collate, without a call per sample.
        dataset: Any = self.dataset
        rows = torch.tensor(indices)
        while type(dataset) is Subset:
            rows = torch.as_tensor(dataset.indices)[rows]
            dataset = dataset.dataset
        return [*map(itemgetter(rows), dataset.tensors)]

    def packed(self, indices: list[int]) -> bytes:
        """The samples with these indices; after `pickle.loads`, `collated` makes a batch of them.

        Raises:
            ConfigError: The dataset does not give them one by one.
        """
        samples = self._fetched(indices)
        if not isinstance(samples, list | tuple):
            raise ConfigError(
                f"the dataset's __getitems__ returned {shown(samples)}, and its samples are needed one by one when"
                " batches change their sizes: return a list of samples"
            )
        return pack(list(samples))

    def _fetched(self, indices: list[int]) -> Any:
        if callable(fetch := getattr(self.dataset, "__getitems__", None)):
            return fetch(indices)
        return [self.dataset[index] for index in indices]


def _default_collate() -> Collate:
    """Return a faster equal of `default_collate`, which also works if its map has been extended."""
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
            return rest(batch)  # Its error says that lengths differ.
        return [make(field) for field in fields]

    return make


def _stacked(batch: Any, **options: Any) -> Any:
    """Collate without the shared memory that a data worker uses, for batches that are sent by value."""
    return torch.stack(batch) if is_small(batch[0], len(batch)) else collate_tensor_fn(batch, **options)


def _whole_numbers(batch: Any, **_: object) -> torch.Tensor:
    """Like `torch.tensor` for whole numbers such as labels, in less than half of the time."""
    array = np.array(batch)
    return torch.from_numpy(array).clone() if array.dtype == np.int64 else torch.tensor(batch)


_QUICKER: Final = {int: (collate_int_fn, _whole_numbers), torch.Tensor: (collate_tensor_fn, _stacked)}
"""Faster equals of some of default_collate's functions, by type."""
