"""Data of this worker's own: batches of the size wanted, from a loader that makes others, and its progress."""

import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from evenstep.core.errors import ConfigError
from evenstep.core.samples import Indices, OwnShares, Share, words_of
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED, IntArray
from evenstep.torch.data.common_data import checksum_of_samples
from evenstep.torch.data.epochs import adopt
from evenstep.torch.data.fetch import inner_loader, pinned, pins
from evenstep.torch.data.order import order_of
from evenstep.torch.data.packing import joined
from evenstep.torch.data.randomness import mixed, seeded_randomness
from evenstep.torch.data.sampling import MAX_LENGTH
from evenstep.torch.engines.engine import Engine
from evenstep.torch.processes.workers import gather
from evenstep.worker.agreement import tell
from evenstep.worker.loader_state import LoaderState, Progress
from evenstep.worker.tracker import Tracker

if TYPE_CHECKING:
    from evenstep.torch.agree import Terms

_ANOTHER_ORDER: Final = (
    "the loader begins with other samples than when the state was taken; unless only a random augmentation makes them"
    " differ, some samples of the epoch come again and others not at all: let the dataset draw its order from a seed"
    " and the epoch (set_epoch), not from the script's random numbers, and keep batch_size and num_workers"
)


@final
@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    """A batch of the loader, with the samples from `start` (included) to `stop` (excluded)."""

    start: int
    stop: int
    batch: Any


@final
class OwnData:
    """Reads a loader's batches, and cuts and joins them by rows.

    Args:
        batches: The loader's batches.
        first: The position of their first sample.
        pin: Whether joined batches go to page-locked memory.

    Attributes:
        shares: This worker's shares of the epoch, which are cut out of the batches.
        known: How many samples of the epoch have been read.
        ended: Whether there are no more.
        checksum: The checksum of the first batch; 0 if it is not known.
    """

    shares: OwnShares

    def __init__(self, batches: Iterator[Any], first: int = 0, *, pin: bool = False) -> None:
        self._batches: Iterator[Any] | None = batches
        self._pin = pin
        self._chunks: deque[_Chunk] = deque()
        self._failure: Exception | None = None
        self.known = first
        self.ended = False
        self.checksum = 0

    @property
    def word(self) -> int:
        """The number that other workers need to know; see `OwnShares`."""
        return 2 * self.known + self.ended

    def read(self, until: int) -> None:
        """Read until so many samples are known, or there are no more.

        Raises:
            ConfigError: A batch cannot be cut by rows.
        """
        if self._failure is not None:
            raise self._failure
        while self.known < until and self._batches is not None:
            try:
                batch = next(self._batches)
            except StopIteration:
                self._batches, self.ended = None, True
                return
            counts = {*_counts(batch)}
            if len(counts) != 1 or None in counts:
                raise ConfigError(
                    f"the loader gave {shown(batch)}, and batches of a worker's own data are cut by rows: let it give"
                    " tensors with a row for each sample, or lists, tuples or dicts of such tensors"
                )
            rows = counts.pop() or 0
            if self.known == 0:
                self.checksum = checksum_of_samples(batch)
            if rows:
                self._chunks.append(_Chunk(self.known, self.known + rows, batch))
                self.known += rows

    def make(self, _: Share, piece: Share) -> Any:
        """The batch of this share. Reads what the next one needs, so that the report on this one tells of it."""
        batch = self.take(piece.positions)
        try:
            self.read(self.shares.ahead)
        except Exception as error:  # Kept for the next `read`, where all workers are told of it.
            self._failure = error
        return batch

    def skip(self, until: int) -> None:
        """Read and drop the samples before this position, but for the last.

        Raises:
            ConfigError: There are fewer.
        """
        while self.known < until and not self.ended:
            self.read(self.known + 1)
            self._drop(until)
        if self.known < until:
            raise ConfigError(
                f"the loader gave {self.known} samples and the state was taken after {until} of them: resume with the"
                " data, and the order of them, that it was taken on"
            )

    def take(self, positions: Sequence[int]) -> Any:
        """The batch of these positions, which are known; those before them are dropped.

        Raises:
            ConfigError: Batches of the loader do not fit together.
        """
        start, stop = positions[0], max(positions) + 1
        self._drop(start + 1)
        first = self._chunks[0]
        if (first.start, first.stop - first.start) == (start, len(positions)) and stop == first.stop:
            batch = first.batch
        else:
            pieces = [
                (chunk.batch, position - chunk.start)
                for position in positions
                for chunk in self._chunks
                if chunk.start <= position < chunk.stop
            ]
            try:
                batch = pinned(joined(pieces), self._pin)
            except (RuntimeError, KeyError, IndexError, TypeError) as error:
                raise ConfigError(
                    "batches of the loader cannot be joined by rows, which sizes that follow speeds need"
                    f" ({type(error).__name__}: {error}): let the loader give tensors of the same shapes, such as texts"
                    " that are padded to one length"
                ) from error
        self._drop(stop)
        return batch

    def close(self) -> None:
        """Let go of the loader's data workers."""
        self._batches = None
        self._chunks.clear()

    def _drop(self, until: int) -> None:
        """Drop the batches of samples that are no longer needed; a worker without samples repeats the last one."""
        while self._chunks and self._chunks[0].stop < until:
            self._chunks.popleft()


def _counts(batch: Any) -> Iterator[int | None]:
    """The rows of each tensor in a batch; None for what has none."""
    if isinstance(batch, torch.Tensor):
        yield len(batch) if batch.dim() else None
    elif isinstance(batch, Mapping):
        for each in batch.values():
            yield from _counts(each)
    elif isinstance(batch, list | tuple) and batch and all(isinstance(each, str | bytes) for each in batch):
        yield len(batch)  # default_collate leaves texts in a list.
    elif isinstance(batch, list | tuple):
        for each in batch:
            yield from _counts(each)
    else:
        yield None


@final
class OwnEpochs:
    """The epochs of one loader that each worker has to itself; attributes and methods as of `Epochs`.

    A loader over a map-style dataset draws in the order of its seed; a loader over an IterableDataset is iterated over
    as it is, once an epoch.
    """

    def __init__(self, terms: "Terms", source: DataLoader[Any], engine: Engine, at: Progress, number: int) -> None:
        self.at = at
        self.order = terms.order
        self.global_batch_size = terms.global_batch_size
        self._stops = terms.own == "stop"
        self._vouched = terms.told_private
        self._firsts: list[int] | None = None
        """Checksums of the workers' first samples in the epoch, once they have met."""
        self._source = source
        self._engine = engine
        self._number = number
        self._loop: OwnData | None = None
        self._resumes_after: IntArray = np.zeros(engine.workers.count, dtype=np.int64)
        if at.chosen:
            self.set_next(at.next_epoch)

    def iterations(self, parts: int = 1) -> int:
        """The iterations of an epoch that never ends, since its length depends on the workers' speeds."""
        return MAX_LENGTH // self.global_batch_size * parts

    def set_next(self, epoch: int) -> None:
        """Make the next loop this epoch."""
        self.at.set_next(epoch)

    def begin(self, *, again: bool) -> OwnData:
        """Begin the next loop, on the last loop's epoch `again` if the script has not chosen one."""
        self.let_go()
        resuming, engine, rank = self.at.begin(again=again), self._engine, self._engine.workers.rank
        taken = self._resumes_after if resuming else np.zeros_like(self._resumes_after)
        if not resuming:
            self._firsts = None
        data = self._data(int(taken[rank]))
        tracker, workers = engine.tracker, engine.workers

        def exchange(record: Mapping[str, Any]) -> list[dict[str, Any]]:
            with engine.meeting(tracker.hearing()):
                return gather(workers, record)

        def meet(until: int) -> IntArray:
            def read() -> tuple[None, dict[str, Any]]:
                data.skip(int(taken[rank]))
                data.read(until)
                place = {"epoch": self.at.epoch, "iteration": shares.iteration}
                return None, {**place, "word": data.word, "first": data.checksum, "vouches": self._vouched}

            records = tell(read, exchange)[1]
            words, known = words_of(records), self._firsts
            self._firsts = [each["first"] for each in records]
            if known is not None and 0 != known[rank] != data.checksum != 0:
                warnings.warn(_ANOTHER_ORDER, stacklevel=2)
            return words

        data.shares = shares = OwnShares(
            worker=rank,
            sizes=tracker.sizes_in(self.at.epoch, self.global_batch_size),
            meet=meet,
            minimum=tracker.smallest_batch,
            stops=self._stops,
            taken=taken,
            iteration=self.at.done,
        )
        self._loop = engine.own = data
        return data

    def _data(self, taken: int) -> OwnData:
        source, epoch = self._source, self.at.epoch
        key = self.order.seed, self._number, epoch, self._engine.workers.rank
        if callable(set_epoch := getattr(source.dataset, "set_epoch", None)):
            set_epoch(epoch)
        if isinstance(source.dataset, IterableDataset):
            with seeded_randomness(*key):  # It draws the seed of its data workers.
                return OwnData(iter(source), pin=pins(source))
        self.order = replace(order_of(source, self._engine.workers, self.order.seed), seed=self.order.seed)
        size = self.order.sampling.batch_size
        length = self.order.length
        if self.order.sampling.drop_last and size is not None:
            length -= length % size
        first = max(taken - 1, 0)  # A worker without samples repeats the last one.
        drawn = self.order.draw(epoch, self._engine.workers, lambda record: [dict(record)])
        randomness, sampler = torch.Generator().manual_seed(mixed(*key)), _looked_up(drawn.indices, first, length)
        how = {"batch_size": size, "sampler": sampler, "collate_fn": source.collate_fn}
        inner = inner_loader(source, source.dataset, randomness, **how)
        return OwnData(iter(inner), first, pin=pins(source))

    def state(self, done: int, tracker: Tracker) -> LoaderState:
        """The state after `done` iterations of the epoch; `length` is 0 while that of the epoch is not known."""
        shares = None if self._loop is None else self._loop.shares
        taken = self._resumes_after if shares is None else shares.after(done)
        over = shares is not None and shares.over and done == shares.iteration
        return LoaderState(
            seed=self.order.seed,
            epoch=self.at.epoch,
            iteration=done,
            looping=self.at.looping,
            length=int(taken.sum()) if over else 0,
            global_batch_size=self.global_batch_size,
            order=None,
            taken=taken.tolist(),
            firsts=self._firsts,
            load=tracker.state_dict(),
        )

    def restore(self, saved: LoaderState, tracker: Tracker) -> None:
        """Continue from a state. Its global batch size and seed win, with a warning.

        Raises:
            ConfigError: It is of a common dataset, or of another number of workers.
        """
        workers = self._engine.workers.count
        if saved.taken is None or len(saved.taken) != workers:
            of = "a common dataset" if saved.taken is None else f"data of {len(saved.taken)} workers' own"
            raise ConfigError(
                f"this loader state is of {of} and the run has data of {workers} workers' own: resume with the"
                " partition, the workers and the data that it was taken on"
            )
        adopt(self, saved, tracker)
        self.let_go()
        self._loop = None
        self._resumes_after = np.array(saved.taken, dtype=np.int64)
        self._firsts = None if saved.length else saved.firsts
        self.at.restore(saved, saved.iteration if saved.length else UNLIMITED)

    def let_go(self) -> None:
        """Let go of the data workers of the last loop."""
        if self._loop is not None:
            self._loop.close()


def _looked_up(indices: Indices, start: int, stop: int) -> Iterator[int]:
    """The indices at the positions from `start` (included) to `stop` (excluded) of an epoch."""
    for first in range(start, stop, block := 2**16):
        yield from indices[np.arange(first, min(first + block, stop))].tolist()
