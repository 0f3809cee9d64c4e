"""Exchanges the rows of all workers over process groups."""

from functools import partial
from typing import final

import numpy as np
import torch
import torch.distributed as dist

from evenstep.core.values import IntArray
from evenstep.launch.c10d import start_exchange
from evenstep.torch.processes.workers import Workers, gather
from evenstep.worker.rows import Rows
from evenstep.worker.tracker import Tracker


@final
class ReportExchange(Rows):
    """All-gathers the rows of all workers.

    Every worker starts and awaits its exchanges at the same places of the iteration, so a decision never depends on
    what has arrived by chance.

    Attributes:
        pending: What there is to wait for.
    """

    def __init__(self, workers: Workers, balancer: Tracker) -> None:
        super().__init__(balancer, partial(gather, workers))
        self._workers = workers
        self.pending: tuple[dist.Work | None, IntArray, IntArray] | None = None

    def start(self, row: list[int]) -> None:
        """Send this worker's row; first finish an exchange under way, to keep the order of collectives."""
        self.wait()
        group, copies = self._workers.host_group, np.empty((self._workers.count, len(row)), dtype=np.int64)
        copies[:] = row
        if group is None:
            self.pending = (None, copies, copies)
            return
        # An all-gather in one hop, from each worker to each. Gloo's all_gather goes round a ring, wake-up by wake-up.
        table = np.empty_like(copies)
        work = start_exchange(torch.from_numpy(table), torch.from_numpy(copies), group)
        # The copies are kept with the rest because the sending thread still reads them.
        self.pending = (work, table, copies)

    def deliver(self, rows: IntArray) -> None:
        """Take in the rows of all workers that another message carried, as a finished exchange."""
        self.wait()
        self.pending = (None, rows, rows)

    @property
    def arrived(self) -> bool:
        """Whether `wait` returns at once."""
        return self.pending is not None and self.pending[0] is None

    def wait(self) -> IntArray | None:
        """Wait for the rows under way, [workers, columns]; None if none are under way.

        Raises:
            RuntimeError: The collective failed.
        """
        if self.pending is None:
            return None
        (work, table, _), self.pending = self.pending, None
        if work is not None:
            work.wait()
        return table
