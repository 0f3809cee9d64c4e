"""Fetches batches in a DataLoader's worker processes, ahead of need."""

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
from evenstep.torch.data.batch_maker import BatchMaker
from evenstep.torch.data.packing import ByValue, joined


@final
class Requests:
    """The index sampler of the inner DataLoader: an endless stream of requests."""

    def __init__(self) -> None:
        self.issued: deque[Request | None] = deque()
        self._ask: Callable[[], _Task | None] = lambda: None

    def begin(self, shares: Shares, order: Indices, *, limit: int | None, by_rows: bool) -> None:
        """From now on, request the samples of these shares, at most `limit` at a time; `by_rows` as in `BatchMaker`."""
        self.issued.clear()

        def ask() -> _Task | None:
            request = shares.request(limit, whole=limit is None and not by_rows)
            self.issued.append(request)
            if request is None:
                return None
            return order[np.array(request.positions)].tolist(), request.whole or by_rows

        self._ask = ask

    def end(self) -> None:
        """Request nothing more."""
        self._ask = lambda: None

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._ask()


_Task: TypeAlias = tuple[list[int], bool]
"""The indices that a data worker fetches, and whether it collates the samples."""


@final
class WorkerDataset(Dataset[Any]):
    """The user's dataset in a data worker, which carries out tasks.

    Attributes are read from and set on the dataset, for a user's `worker_init_fn`.
    """

    __slots__ = ("_evenstep_maker",)

    def __init__(self, maker: BatchMaker) -> None:
        object.__setattr__(self, "_evenstep_maker", maker)

    def __getitem__(self, index: Any) -> Any:
        return self._evenstep_maker.dataset[index]

    def __getitems__(self, task: _Task | None) -> Any:
        if task is None:
            return None
        indices, collated = task
        maker: BatchMaker = self._evenstep_maker
        return ByValue(maker.batch(indices)) if collated else maker.packed(indices)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_evenstep_maker").dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._evenstep_maker.dataset, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return WorkerDataset, (self._evenstep_maker,)


@final
@dataclass(frozen=True, slots=True)
class _Chunk:
    """A data worker's result: a batch of these positions or, if it is not `collated`, their samples."""

    positions: tuple[int, ...]
    content: Any
    collated: bool


@final
class ProcessFetcher:
    """Fetches in a DataLoader's worker processes, along shares that may change at any time.

    Whenever the DataLoader returns a chunk it asks for work, and gets the request that is needed soonest. It keeps the
    order of requests, so a late one waits for those under way. Its index sampler must not end before the epoch does,
    so when nothing is left to request it gets an empty request. A chunk is the batch itself unless sizes have changed
    since the request.
    """

    def __init__(self, inner: DataLoader[Any], requests: Requests, maker: BatchMaker, *, pin: bool) -> None:
        self._chunks = iter(inner)
        self._requests = requests
        self._maker = maker
        self._pin = pin
        self._held: dict[int, list[_Chunk]] = {}

    def fetch(self, iteration: int, positions: Sequence[int]) -> Any:
        """The collated batch of these positions, in their order; receives chunks until it is complete.

        What is held of earlier iterations is dropped. That of this one may be needed again: by micro-batches that
        repeat its samples, and where members come and go by the next try of a step that did not count.
        """
        self._held = {key: chunks for key, chunks in self._held.items() if key >= iteration}
        while (found := self._found(iteration, positions)) is None:
            self._receive()
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
        """The batch, in a tuple, if all of it has arrived."""
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
            return (pinned(joined(pieces), self._pin),)
        samples = [content[row] for content, row in pieces]
        return (pinned(self._maker.collated(samples), self._pin),)


def inner_loader(
    source: DataLoader[Any], dataset: Dataset[Any], randomness: torch.Generator, **how: Any
) -> DataLoader[Any]:
    """Make a DataLoader over this dataset with the user's worker settings, and `how` it makes batches.

    Its data workers are seeded from `randomness`, so the script's generator does not advance.
    """
    return DataLoader(
        dataset,
        num_workers=source.num_workers,
        pin_memory=pins(source),
        timeout=source.timeout,
        worker_init_fn=source.worker_init_fn,
        multiprocessing_context=source.multiprocessing_context,
        prefetch_factor=source.prefetch_factor,
        generator=randomness,
        **how,
    )


def as_made(batch: Any) -> Any:
    """Return the batch, which is already collated."""
    return batch


def pins(source: DataLoader[Any]) -> bool:
    """True if batches go to page-locked memory: the user's loader asks for it, and there is a GPU."""
    return bool(source.pin_memory) and torch.cuda.is_available()


def pinned(batch: Any, pin: bool) -> Any:
    """Return the batch, in page-locked memory if `pin` is set."""
    return pin_memory(batch) if pin else batch  # type: ignore[no-untyped-call]
