"""Fetches the batch of the next share while the script computes on the current one."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar, final

import numpy as np

from evenstep.core.values import IntArray

Batch = TypeVar("Batch")
Begin = Callable[[IntArray], Callable[[], Batch]]
"""Begins to fetch the batch with these indices, and returns a function that waits for it."""


@final
class Ahead(Generic[Batch]):
    """The batches of a loop. Each depends on its indices alone, however much of it was fetched ahead.

    The size of a share is known when it is due. If it has changed, what is missing is fetched then, and joined with the
    rows that the share keeps. Batches that are padded to their own longest row, or are not NumPy arrays, cannot be
    joined: they are fetched again, and from then on nothing is fetched ahead of the share.

    Args:
        fetch: Returns the batch with these indices, int64 of shape [rows].
        begin: Begins to fetch it in the background; None: nothing is fetched ahead.
        leaves: Returns the arrays of a batch, with a row for each index.
        build: Returns a batch of the form of another with these arrays; None: batches are not joined.
    """

    def __init__(
        self,
        fetch: Callable[[IntArray], Batch],
        begin: Begin[Batch] | None,
        *,
        leaves: Callable[[Batch], Sequence[Any]] = lambda batch: (),
        build: Callable[[Batch, Sequence[Any]], Batch] | None = None,
    ) -> None:
        self._fetch, self._begin = fetch, begin
        self._leaves, self._build = leaves, build
        self._planned: IntArray | None = None
        self._coming: Callable[[], Batch] | None = None
        self._shapes: list[Any] | None = None  # Shapes of the rows of the first batch.
        self._kept = True  # True if the last share was as planned.

    def plan(self, indices: IntArray | None) -> None:
        """Plan these indices for the next batch if the sizes stay as they are; None: there is no next batch."""
        self._planned = indices
        if self._begin is not None and indices is not None and (self._build is not None or self._kept):
            self._coming = self._begin(indices)

    def batch(self, indices: IntArray) -> Batch:
        """Return the batch with these indices. The data is read by one thread at a time."""
        planned, fetched = self._planned, None if self._coming is None else self._coming()
        self._planned = self._coming = None
        self._kept = planned is None or np.array_equal(planned, indices)
        if planned is not None and fetched is not None and (self._kept or self._build is not None):
            batch = fetched if self._kept else self._joined(planned, fetched, indices)
        else:
            batch = self._fetch(indices)
        if self._build is not None and not self._is_alike(batch):
            self._build = None
        return batch

    def _joined(self, planned: IntArray, batch: Batch, indices: IntArray) -> Batch:
        missing = np.setdiff1d(indices, planned)
        parts = [batch, self._fetch(missing)] if len(missing) else [batch]
        if self._build is None or not all(map(self._is_alike, parts)):
            return self._fetch(indices)
        fetched = np.concatenate([planned, missing])
        order = np.argsort(fetched, kind="stable")
        rows = order[np.searchsorted(fetched, indices, sorter=order)]
        return self._build(batch, [np.concatenate(same)[rows] for same in zip(*map(self._leaves, parts), strict=True)])

    def _is_alike(self, batch: Batch) -> bool:
        """True if the rows have the shapes of the first batch's rows, and can be joined with them."""
        leaves = self._leaves(batch)
        shapes = [(each.shape[1:], each.dtype) for each in leaves if isinstance(each, np.ndarray)]
        self._shapes = shapes if self._shapes is None else self._shapes
        return len(shapes) == len(leaves) and shapes == self._shapes


def in_thread(fetch: Callable[[IntArray], Batch]) -> Begin[Batch]:
    """Fetch in a thread. An error there is raised where the batch is waited for."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="evenstep fetch")
    return lambda indices: thread.submit(fetch, indices).result
