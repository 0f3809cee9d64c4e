"""Fetches batches: in this process, or in a DataLoader's worker processes, ahead of need."""

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.pin_memory import pin_memory

from evenstep.core.samples import Indices, Request, Shares
from evenstep.torch.data.batch_maker import Addresses, BatchMaker
from evenstep.torch.data.packing import ByValue, joined


@final
class InlineFetcher:
    """Fetches in this process, when the batch is needed."""

    def __init__(self, maker: BatchMaker, epoch: int, order: Indices, *, pin: bool) -> None:
        self._maker = maker
        self._order = order
        self._epoch = epoch
        self._pin = pin

    def fetch(self, _: int, positions: Sequence[int], *, last: bool = True) -> Any:
        """The collated batch of these positions, in their order."""
        indices = self._order[np.array(positions)].tolist()
        return _pinned(self._maker.batch((self._epoch, positions, indices)), self._pin)


@final
class Requests:
    """The index sampler of the inner DataLoader: an endless stream of what to fetch next."""

    def __init__(self) -> None:
        self.issued: deque[Request | None] = deque()
        self._ask: Callable[[], _Task | None] = _nothing

    def begin(self, shares: Shares, epoch: int, order: Indices, *, limit: int | None, by_rows: bool) -> None:
        """From now on, ask for the samples of these shares, at most `limit` at a time; `by_rows` as in `BatchMaker`."""
        self.issued.clear()

        def ask() -> _Task | None:
            request = shares.request(limit, whole=limit is None and not by_rows)
            self.issued.append(request)
            if request is None:
                return None
            indices = order[np.array(request.positions)].tolist()
            return (epoch, request.positions, indices), request.whole or by_rows

        self._ask = ask

    def end(self) -> None:
        """Ask for nothing more."""
        self._ask = _nothing

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._ask()


_Task: TypeAlias = tuple[Addresses, bool]
"""What a data worker fetches, and whether it collates that."""


def _nothing() -> None:
    """Nothing is left to ask for."""


@final
class WorkerDataset(Dataset[Any]):
    """The user's dataset in a data worker, which carries out tasks.

    Attributes are the dataset's own, because a user's `worker_init_fn` reads and sets them.
    """

    __slots__ = ("_evenstep_maker",)

    def __init__(self, maker: BatchMaker) -> None:
        object.__setattr__(self, "_evenstep_maker", maker)

    def __getitem__(self, index: Any) -> Any:
        return self._evenstep_maker.dataset[index]

    def __getitems__(self, task: _Task | None) -> Any:
        if task is None:
            return None
        addresses, collated = task
        maker: BatchMaker = self._evenstep_maker
        return ByValue(maker.batch(addresses)) if collated else maker.packed(addresses)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_evenstep_maker").dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._evenstep_maker.dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerDataset, (self._evenstep_maker,)


@final
@dataclass(frozen=True, slots=True)
class _Chunk:
    """What a data worker sent: a batch of these positions, or if it is not `collated`, their samples."""

    positions: tuple[int, ...]
    content: Any
    collated: bool


@final
class ProcessFetcher:
    """Fetches in a DataLoader's worker processes, along shares that may change at any time.

    Whenever the DataLoader hands back a chunk it asks for work, and gets what is needed soonest. It keeps the order of
    requests, so a late request waits for those under way. When nothing is left to ask for it gets nothing to do, since
    its index sampler must not end before the epoch does. A chunk is the batch itself unless sizes have changed since it
    was asked for.
    """

    def __init__(self, inner: DataLoader[Any], requests: Requests, maker: BatchMaker, epoch: int, *, pin: bool) -> None:
        self._chunks = iter(inner)
        self._requests = requests
        self._maker = maker
        self._epoch = epoch
        self._pin = pin
        self._held: dict[int, list[_Chunk]] = {}

    def fetch(self, iteration: int, positions: Sequence[int], *, last: bool = True) -> Any:
        """The collated batch of these positions, in their order; receives chunks until it is complete.

        `last`: no more positions of this iteration will be asked for.
        """
        while (found := self._found(iteration, positions)) is None:
            self._receive()
        if last:  # Other micro-batches of this iteration may need copies of the same samples.
            self._held = {key: chunks for key, chunks in self._held.items() if key > iteration}
        return found[0]

    def _receive(self) -> None:
        content = next(self._chunks)
        request = self._requests.issued.popleft()
        if request is None:
            return
        collated = request.whole or self._maker.by_rows
        chunk = _Chunk(request.positions, content if collated else pickle.loads(content), collated)
        self._held.setdefault(request.iteration, []).append(chunk)

    def _found(self, iteration: int, positions: Sequence[int]) -> tuple[Any] | None:
        """The batch, in a tuple, if all of it has been received."""
        chunks = self._held.get(iteration)
        if chunks is None:
            return None
        for chunk in chunks:
            if chunk.collated and chunk.positions == positions:
                return (chunk.content,)
        rows = {
            position: (chunk.content, row)
            for chunk in chunks
            if self._maker.by_rows or not chunk.collated
            for row, position in enumerate(chunk.positions)
        }
        if not rows.keys() >= set(positions):
            return None
        pieces = [rows[position] for position in positions]
        if self._maker.by_rows:
            return (_pinned(joined(pieces), self._pin),)
        samples = [content[row] for content, row in pieces]
        return (_pinned(self._maker.collated(self._epoch, positions, samples), self._pin),)


Fetcher: TypeAlias = InlineFetcher | ProcessFetcher


def inner_loader(source: DataLoader[Any], maker: BatchMaker, seed: int, requests: Requests) -> DataLoader[Any]:
    """A DataLoader with the user's worker settings that fetches what `requests` asks for."""
    generator = torch.Generator()
    generator.manual_seed(seed)  # Otherwise it draws from the script's own stream.
    return DataLoader(
        WorkerDataset(maker),
        batch_sampler=requests,
        num_workers=source.num_workers,
        collate_fn=_as_made,
        pin_memory=pins(source),
        timeout=source.timeout,
        worker_init_fn=source.worker_init_fn,
        multiprocessing_context=source.multiprocessing_context,
        prefetch_factor=source.prefetch_factor,
        persistent_workers=source.persistent_workers,
        generator=generator,
    )


def _as_made(batch: Any) -> Any:
    """It is collated already."""
    return batch


def pins(source: DataLoader[Any]) -> bool:
    """Whether batches go to page-locked memory: the user's loader asks for that, and there is a GPU."""
    return bool(source.pin_memory) and torch.cuda.is_available()


def _pinned(batch: Any, pin: bool) -> Any:
    return pin_memory(batch) if pin else batch  # type: ignore[no-untyped-call]
