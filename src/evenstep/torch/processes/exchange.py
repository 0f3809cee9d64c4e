"""The exchange of integers: one row per worker and iteration, all-gathered while backward still communicates."""

from typing import final

import numpy as np
import torch
import torch.distributed as dist

from evenstep.core.values import IntArray
from evenstep.torch.processes.workers import Workers


@final
class Exchange:
    """All-gathers rows of `columns` integers, one exchange at a time; a new one supersedes the one before.

    Every worker starts and awaits its exchanges at the same places of the iteration, so what a decision is based on
    never depends on what has happened to arrive.
    """

    def __init__(self, workers: Workers, columns: int) -> None:
        self._workers = workers
        self._columns = columns
        self._pending: tuple[dist.Work | None, torch.Tensor, torch.Tensor | None] | None = None

    def start(self, row: list[int]) -> None:
        """Send this worker's row. Collects the exchange before, where nobody has, as the order of collectives needs."""
        self.finish()
        mine = torch.tensor(row, dtype=torch.int64)
        if self._workers.host_group is None:
            self._pending = (None, mine.unsqueeze(0), mine)
            return
        table = torch.empty((self._workers.count, self._columns), dtype=torch.int64)
        # An all-gather in one hop: everybody sends to everybody. Gloo's own all_gather goes round a ring, one
        # wake-up after the other.
        copies = mine.repeat(self._workers.count, 1)
        work = dist.all_to_all_single(table, copies, group=self._workers.host_group, async_op=True)
        # The copies are kept with the rest because the sending thread still reads them.
        self._pending = (work, table, copies)

    def deliver(self, table: IntArray) -> None:
        """Take a table that came with something else, as an exchange that is over."""
        self.finish()
        self._pending = (None, torch.from_numpy(table), None)

    def finish(self) -> IntArray | None:
        """Wait for the exchange under way and return its [workers, columns] table; None where none is under way.

        Raises:
            RuntimeError: The collective failed.
        """
        if self._pending is None:
            return None
        (work, table, _), self._pending = self._pending, None
        if work is not None:
            work.wait()
        return np.asarray(table.numpy(), dtype=np.int64)
