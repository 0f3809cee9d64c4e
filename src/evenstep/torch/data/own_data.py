"""Batches of the size wanted, from a loader of this worker's own that makes batches of another size."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from evenstep.core.errors import ConfigError
from evenstep.core.samples import OwnShares, Share
from evenstep.core.shown import shown
from evenstep.torch.data.common_data import checksum_of_samples
from evenstep.torch.data.fetch import pinned
from evenstep.torch.data.packing import joined


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
            rows = _rows_of(batch)
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


def _rows_of(batch: Any) -> int:
    counts = {*_counts(batch)}
    if len(counts) != 1 or None in counts:
        raise ConfigError(
            f"the loader gave {shown(batch)}, and batches of a worker's own data are cut by rows: let it give tensors"
            " with a row for each sample, or lists, tuples or dicts of such tensors"
        )
    return int(counts.pop() or 0)


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
