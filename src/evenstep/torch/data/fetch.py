"""Fetches samples: in this process, or in a DataLoader's worker processes, in chunks ahead of need."""

import copy
import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, Final, Protocol, final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from evenstep.core.samples import Shares
from evenstep.core.values import IntArray
from evenstep.torch.data.order import SeededRandomness, seed_everything

Address = tuple[int, int, int]
"""Epoch, position in the epoch, index in the dataset."""


class Fetcher(Protocol):
    """Gets this worker's samples of one iteration."""

    def fetch(self, iteration: int, positions: Sequence[int], *, last: bool = True) -> Any:
        """The collated batch of these positions, in their order; `last`: no more of the iteration will be asked for."""


@final
class SeededDataset(Dataset[Any]):
    """The user's dataset, addressed by `Address`; each sample's randomness derives from seed, epoch and position.

    So an augmentation does not depend on which worker, or which of its processes, happens to compute it. Attributes
    are the dataset's own, because a user's `worker_init_fn` reads and sets them on what it finds.
    """

    __slots__ = ("_dataset", "_random", "_seed")

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        object.__setattr__(self, "_dataset", dataset)
        object.__setattr__(self, "_seed", seed)
        object.__setattr__(self, "_random", not _draws_nothing(dataset))

    def __getitem__(self, address: Address) -> Any:
        epoch, position, index = address
        if self._random:
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

    # Without this, DataLoader would find the user's batched getter through __getattr__ and hand it our addresses.
    def __getitems__(self, addresses: list[Address]) -> list[Any]:
        return [self[address] for address in addresses]


def _draws_nothing(dataset: Dataset[Any]) -> bool:
    """Whether getting a sample is known to draw no random numbers, so that seeding each one can be spared."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return type(dataset) is TensorDataset


@final
class InlineFetcher:
    """Fetches in this process, when the batch is needed."""

    def __init__(self, source: DataLoader[Any], seed: int, epoch: int, order: IntArray) -> None:
        self._source = source.dataset
        self._dataset = SeededDataset(source.dataset, seed)
        self._collate: Callable[[list[Any]], Any] = source.collate_fn
        self._pin = source.pin_memory
        self._epoch = epoch
        self._order = order
        self._key = (seed, epoch)
        self._plain = _draws_nothing(source.dataset)

    def fetch(self, iteration: int, positions: Sequence[int], *, last: bool = True) -> Any:
        """The collated batch."""
        indices = self._order[np.array(positions)]
        if self._plain and self._collate is default_collate:
            return _pinned(_rows_of(self._source, torch.from_numpy(indices)), self._pin)
        addresses = list(zip([self._epoch] * len(positions), positions, indices.tolist(), strict=True))
        if self._plain:
            return _pinned(self._collate([self._dataset[address] for address in addresses]), self._pin)
        # The script's own stream of random numbers (dropout) must not notice that samples were drawn in between.
        with SeededRandomness(*self._key, iteration):
            return _pinned(self._collate([self._dataset[address] for address in addresses]), self._pin)


def _rows_of(dataset: Dataset[Any], indices: torch.Tensor) -> list[torch.Tensor]:
    """What default_collate makes of these samples of a TensorDataset, without a call per sample."""
    while isinstance(dataset, Subset):
        indices = torch.as_tensor(dataset.indices)[indices]
        dataset = dataset.dataset
    assert isinstance(dataset, TensorDataset)
    return [tensor[indices] for tensor in dataset.tensors]


@final
class ProcessFetcher:
    """Fetches in a DataLoader's worker processes, in chunks, along a lookahead that may change its mind at any time.

    The DataLoader asks for work whenever it hands back a chunk; it then gets what is needed soonest. It keeps the order
    of requests, so a late one waits for those under way. Where nothing is left to ask for it gets an empty chunk, since
    its index sampler must not end before the epoch does.
    """

    def __init__(
        self, inner: DataLoader[Any], requests: "Requests", collate: Callable[[list[Any]], Any] | None, pin: bool
    ) -> None:
        self._chunks = iter(inner)
        self._requests = requests
        self._collate = collate
        self._pin = pin
        self._held: dict[tuple[int, int], tuple[Any, int]] = {}

    def fetch(self, iteration: int, positions: Sequence[int], *, last: bool = True) -> Any:
        """The collated batch; receives chunks until it is complete."""
        keys = [(iteration, position) for position in positions]
        while any(key not in self._held for key in keys):
            chunk = next(self._chunks)
            of_iteration, received = self._requests.issued.popleft()
            samples = chunk if self._collate is None or not received else pickle.loads(chunk)
            self._held.update({(of_iteration, p): (samples, row) for row, p in enumerate(received)})
        pieces = [self._held[key] for key in keys]
        if last:  # Other micro-batches of this iteration may need the same samples again, as copies.
            self._held = {key: piece for key, piece in self._held.items() if key[0] > iteration}
        if self._collate is not None:
            return _pinned(self._collate([samples[row] for samples, row in pieces]), self._pin)
        return _pinned(_joined(_runs(pieces)), self._pin)


@final
class Requests:
    """The index sampler of the inner DataLoader: an endless stream of chunks of addresses."""

    def __init__(self, source: DataLoader[Any]) -> None:
        self._processes = source.num_workers
        self.issued: deque[tuple[int, tuple[int, ...]]] = deque()
        self._ask: Callable[[], list[Address]] = list

    def begin(self, shares: Shares, epoch: int, order: IntArray, chunk_size: Callable[[], int]) -> None:
        """Ask along these shares from now on."""
        self.issued.clear()

        def ask() -> list[Address]:
            request = shares.request(chunk_size())
            iteration, positions = request if request is not None else (-1, ())
            self.issued.append((iteration, positions))
            return [(epoch, position, int(order[position])) for position in positions]

        self._ask = ask

    def end(self) -> None:
        """Ask for nothing more."""
        self._ask = list

    def __iter__(self) -> Iterator[list[Address]]:
        while True:
            yield self._ask()


def inner_loader(source: DataLoader[Any], seed: int, requests: Requests) -> DataLoader[Any]:
    """A DataLoader with the user's worker settings that fetches chunks as `requests` asks for them."""
    generator = torch.Generator()
    generator.manual_seed(seed)  # Else it would draw from the script's own stream.
    prefetch_factor = source.prefetch_factor or 2
    return DataLoader(
        SeededDataset(source.dataset, seed),
        batch_sampler=requests,
        num_workers=source.num_workers,
        collate_fn=_pack_default if source.collate_fn is default_collate else _pack_samples,
        timeout=source.timeout,
        worker_init_fn=source.worker_init_fn,
        multiprocessing_context=source.multiprocessing_context,
        # The user counts whole batches; a batch is one chunk of each process here.
        prefetch_factor=prefetch_factor * source.num_workers,
        persistent_workers=source.persistent_workers,
        generator=generator,
    )


def _pack_default(samples: list[Any]) -> Any:
    """One tensor per field, not one per sample: each takes a file descriptor on its way between processes."""
    return default_collate(samples) if samples else None


def _pack_samples(samples: list[Any]) -> bytes | None:
    """For a `collate_fn` of the user's own, which gets samples: one string of bytes, for the same reason."""
    if not samples:
        return None
    packed = io.BytesIO()
    _CompactPickler(packed, pickle.HIGHEST_PROTOCOL).dump(samples)
    return packed.getvalue()


@final
class _CompactPickler(pickle.Pickler):
    """Packs of each tensor only the elements that it shows.

    A sample of an in-memory dataset is a view (`self.x[i]`), with which pickle would pack the storage of the dataset.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
            return NotImplemented  # What a sparse tensor is made of comes here by itself.
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
    """Whether a NumPy array says everything of it."""
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
    """The batch in page-locked memory, where the user's loader asked for that and there is a GPU."""
    if not pin or not torch.cuda.is_available():
        return batch
    if hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if isinstance(batch, dict):
        return {name: _pinned(value, pin) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_pinned(value, pin) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_pinned(value, pin) for value in batch)
    return batch
