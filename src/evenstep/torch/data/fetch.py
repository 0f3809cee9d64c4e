"""Fetches samples: in this process, or in a DataLoader's worker processes, in chunks ahead of need."""

import copy
import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from evenstep.core.samples import Indices, Shares
from evenstep.torch.data.order import Generators, seed_everything

Address = tuple[int, int, int]
"""Epoch, position in the epoch, index in the dataset."""


@final
class SeededDataset(Dataset[Any]):
    """The user's dataset, addressed by `Address`; each sample's randomness derives from seed, epoch and position.

    So an augmentation does not depend on the worker, or the process, that computes it. Seeding takes longer than many a
    sample, so samples are fetched without it until one of them draws a random number. Attributes are the dataset's own,
    because a user's `worker_init_fn` reads and sets them.
    """

    __slots__ = ("_dataset", "_draws", "_seed")

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        object.__setattr__(self, "_dataset", dataset)
        object.__setattr__(self, "_seed", seed)
        object.__setattr__(self, "_draws", False)

    def __getitem__(self, address: Address) -> Any:
        epoch, position, index = address
        seed_everything(self._seed, epoch, position)
        return self._dataset[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_dataset"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __getstate__(self) -> tuple[Any, int]:
        return self._dataset, self._seed

    def __setstate__(self, state: tuple[Any, int]) -> None:
        self.__init__(*state)

    def __getitems__(self, addresses: list[Address]) -> list[Any]:
        samples: list[Any] = fetched(self, addresses, list)
        return samples


def fetched(dataset: SeededDataset, addresses: list[Address], collate: Callable[[list[Any]], Any]) -> Any:
    """The collated samples of these addresses; the script's own stream of random numbers does not move.

    A fetch that draws a number is done once more, with a seed for each sample, and so are all after it. So what one
    gets never depends on which fetch was the first to draw.
    """
    generators, own = Generators(), object.__getattribute__(dataset, "_dataset")
    if not object.__getattribute__(dataset, "_draws"):
        batch = collate(_unseeded(own, [index for _, _, index in addresses]))
        if generators.same():
            return batch
        object.__setattr__(dataset, "_draws", True)
    try:
        return collate([dataset[address] for address in addresses])
    finally:
        generators.restore()


def _unseeded(dataset: Any, indices: list[int]) -> list[Any]:
    if indices and callable(getattr(dataset, "__getitems__", None)):
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]


def _is_plain(dataset: Dataset[Any]) -> bool:
    """Whether its samples are rows of tensors."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset


@final
class InlineFetcher:
    """Fetches in this process, when the batch is needed."""

    def __init__(self, source: DataLoader[Any], dataset: SeededDataset, epoch: int, order: Indices) -> None:
        self._source = source
        self._dataset = dataset
        self._order = order
        self._epoch = epoch
        self._plain = _is_plain(source.dataset)

    def fetch(self, _: int, positions: Sequence[int], *, last: bool = True) -> Any:
        """The collated batch of these positions, in their order."""
        indices, pin = self._order[np.array(positions)], self._source.pin_memory
        if self._plain and self._source.collate_fn is default_collate:
            return _pinned(_rows_of(self._source.dataset, torch.from_numpy(indices)), pin)
        addresses = [(self._epoch, *each) for each in zip(positions, indices.tolist(), strict=True)]
        return _pinned(fetched(self._dataset, addresses, self._source.collate_fn), pin)


def _rows_of(dataset: Dataset[Any], indices: torch.Tensor) -> list[torch.Tensor]:
    """What default_collate makes of these samples of a TensorDataset, without a call per sample."""
    while isinstance(dataset, Subset):
        indices = torch.as_tensor(dataset.indices)[indices]
        dataset = dataset.dataset
    assert isinstance(dataset, TensorDataset)
    return [tensor[indices] for tensor in dataset.tensors]


@final
class Requests:
    """The index sampler of the inner DataLoader: an endless stream of chunks of addresses."""

    def __init__(self) -> None:
        self.issued: deque[tuple[int, tuple[int, ...]]] = deque()
        self._ask: Callable[[], list[Address]] = list

    def begin(self, shares: Shares, epoch: int, order: Indices, chunk_size: Callable[[], int]) -> None:
        """From now on, ask for the samples of these shares."""
        self.issued.clear()

        def ask() -> list[Address]:
            request = shares.request(chunk_size())
            iteration, positions = request if request is not None else (-1, ())
            self.issued.append((iteration, positions))
            indices = order[np.array(positions, dtype=np.int64)].tolist()
            return [(epoch, *address) for address in zip(positions, indices, strict=True)]

        self._ask = ask

    def end(self) -> None:
        """Ask for nothing more."""
        self._ask = list

    def __iter__(self) -> Iterator[list[Address]]:
        while True:
            yield self._ask()


@final
class ProcessFetcher:
    """Fetches in a DataLoader's worker processes, in chunks, along shares that may change at any time.

    Whenever the DataLoader hands back a chunk it asks for work, and gets what is needed soonest. It keeps the order of
    requests, so a late request waits for those under way. When nothing is left to ask for it gets an empty chunk,
    since its index sampler must not end before the epoch does.
    """

    def __init__(self, inner: DataLoader[Any], requests: Requests, source: DataLoader[Any]) -> None:
        self._chunks = iter(inner)
        self._requests = requests
        self._collate = None if source.collate_fn is default_collate else source.collate_fn
        self._pin = source.pin_memory
        self._held: dict[tuple[int, int], tuple[Any, int]] = {}

    def fetch(self, iteration: int, positions: Sequence[int], *, last: bool = True) -> Any:
        """The collated batch of these positions, in their order; receives chunks until it is complete.

        `last`: no more positions of this iteration will be asked for.
        """
        keys = [(iteration, position) for position in positions]
        while any(key not in self._held for key in keys):
            chunk = next(self._chunks)
            of_iteration, received = self._requests.issued.popleft()
            samples = chunk if self._collate is None or not received else pickle.loads(chunk)
            self._held.update({(of_iteration, p): (samples, row) for row, p in enumerate(received)})
        pieces = [self._held[key] for key in keys]
        if last:  # Other micro-batches of this iteration may need copies of the same samples.
            self._held = {key: piece for key, piece in self._held.items() if key[0] > iteration}
        if self._collate is None:
            return _pinned(_joined(_runs(pieces)), self._pin)
        return _pinned(self._collate([samples[row] for samples, row in pieces]), self._pin)


Fetcher: TypeAlias = InlineFetcher | ProcessFetcher


def inner_loader(source: DataLoader[Any], dataset: SeededDataset, seed: int, requests: Requests) -> DataLoader[Any]:
    """A DataLoader with the user's worker settings that fetches chunks as `requests` asks for them."""
    generator = torch.Generator()
    generator.manual_seed(seed)  # Otherwise it draws from the script's own stream.
    prefetch_factor = source.prefetch_factor or 2
    return DataLoader(
        dataset,
        batch_sampler=requests,
        num_workers=source.num_workers,
        collate_fn=_pack_default if source.collate_fn is default_collate else _pack_samples,
        timeout=source.timeout,
        worker_init_fn=source.worker_init_fn,
        multiprocessing_context=source.multiprocessing_context,
        # The user counts whole batches, of which each process fetches one chunk.
        prefetch_factor=prefetch_factor * source.num_workers,
        persistent_workers=source.persistent_workers,
        generator=generator,
    )


def _pack_default(samples: list[Any]) -> Any:
    """One tensor per field: each tensor takes a file descriptor on its way between processes."""
    return default_collate(samples) if samples else None


def _pack_samples(samples: list[Any]) -> bytes | None:
    """For a `collate_fn` of the user's own, which takes samples: one string of bytes, for the same reason."""
    if not samples:
        return None
    packed = io.BytesIO()
    _CompactPickler(packed, pickle.HIGHEST_PROTOCOL).dump(samples)
    return packed.getvalue()


@final
class _CompactPickler(pickle.Pickler):
    """Packs only the elements that a tensor shows.

    A sample of an in-memory dataset is a view (`self.x[i]`), for which pickle packs the storage of the whole dataset.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
            return NotImplemented  # A sparse tensor's parts come here one by one.
        stored = value.untyped_storage().nbytes()
        if _is_array(value) and value.nbytes <= stored:
            return torch.from_numpy, (value.numpy(),)  # Ten times as fast as a tensor.
        if value.nbytes >= stored:
            return NotImplemented
        compact = value.detach().clone()
        if type(compact) is not type(value):
            return NotImplemented
        compact.requires_grad_(value.requires_grad)
        vars(compact).update(vars(value))
        return compact.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]


def _is_array(tensor: torch.Tensor) -> bool:
    """Whether a NumPy array holds all of it."""
    return (
        type(tensor) is torch.Tensor
        and tensor.dtype in _ARRAYS
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg() or vars(tensor))
    )


_ARRAYS: Final = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    }
)


def _runs(pieces: list[tuple[Any, int]]) -> list[tuple[Any, list[int]]]:
    """Neighbouring pieces of one chunk put together: (chunk, rows)."""
    runs: list[tuple[Any, list[int]]] = []
    for chunk, row in pieces:
        if runs and runs[-1][0] is chunk:
            runs[-1][1].append(row)
        else:
            runs.append((chunk, [row]))
    return runs


def _joined(runs: list[tuple[Any, list[int]]]) -> Any:
    """One default-collated batch of the given rows of default-collated chunks."""
    first = runs[0][0]
    if isinstance(first, torch.Tensor):
        return torch.cat([_rows(chunk, rows) for chunk, rows in runs])
    if isinstance(first, MutableMapping):
        joined = copy.copy(first)  # Keeps the type, as default_collate does.
        joined.update({name: _joined([(chunk[name], rows) for chunk, rows in runs]) for name in first})
        return joined
    if first and isinstance(first[0], str | bytes) and not hasattr(first, "_fields"):
        return type(first)(chunk[row] for chunk, rows in runs for row in rows)
    fields = [_joined([(chunk[field], rows) for chunk, rows in runs]) for field in range(len(first))]
    if hasattr(first, "_fields"):
        return type(first)(*fields)
    return type(first)(fields)


def _rows(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return tensor[rows[0] : rows[0] + len(rows)]
    return tensor[torch.from_numpy(np.array(rows))]


def _pinned(batch: Any, pin: bool) -> Any:
    """The batch in page-locked memory, if the user's loader asks for that and there is a GPU."""
    return pin_memory(batch) if pin and torch.cuda.is_available() else batch  # type: ignore[no-untyped-call]
