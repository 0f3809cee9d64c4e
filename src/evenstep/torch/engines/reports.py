"""Exchanges the rows of all workers over process groups."""

from functools import partial
from typing import TYPE_CHECKING, final

import numpy as np
import torch
import torch.distributed as dist

from evenstep.core.values import IntArray
from evenstep.launch.c10d import start_exchange
from evenstep.torch.processes.workers import Workers, gather
from evenstep.worker.meter import Meter, Rows

if TYPE_CHECKING:
    from evenstep.worker.peers import Peers


class ReportExchange(Rows):
    """All-gathers the rows of all workers.

    Every worker starts and awaits its exchanges at the same places of the iteration, so a decision never depends on
    which messages happen to have arrived.

    Attributes:
        rows: The rows of all workers, [workers, columns], which are there when `work` is done; None if none are sent.
            They may also come with another message.
        work: The exchange that is under way, if any.
    """

    def __init__(self, workers: Workers, meter: Meter) -> None:
        super().__init__(meter, partial(gather, workers))
        self._workers = workers
        self.rows: IntArray | None = None
        self.work: dist.Work | None = None

    def start(self, row: list[int]) -> None:
        """Send this worker's row; first finish an exchange under way, to keep the order of collectives."""
        self.wait()
        group, copies = self._workers.host_group, np.empty((self._workers.count, len(row)), dtype=np.int64)
        copies[:] = row
        if group is None:
            self.rows = copies
            return
        # An all-gather in one hop, from each worker to each. Gloo's all_gather wakes up at each hop of a ring.
        self.rows, self._sent = np.empty_like(copies), copies  # The sending thread still reads the copies.
        self.work = start_exchange(torch.from_numpy(self.rows), torch.from_numpy(copies), group)

    def wait(self) -> IntArray | None:
        """Wait for the rows under way, [workers, columns]; None if none are under way.

        Raises:
            RuntimeError: The collective failed.
        """
        (work, rows), self.work, self.rows = (self.work, self.rows), None, None
        if work is not None:
            work.wait()
        return rows


@final
class PeerReports(ReportExchange):
    """Exchanges the rows of all processes, and takes each worker's from its slowest peer."""

    def __init__(self, workers: Workers, meter: Meter, peers: "Peers") -> None:
        super().__init__(workers.processes, meter)
        self._peers = peers

    def check(self, rows: IntArray) -> IntArray:
        if (rows[:, 0] == rows[0, 0]).all():
            self._peers.require_same_batches(rows[:, -1])
            return super().check(self._peers.slowest(rows))
        with self._peers.naming():
            return super().check(rows)


def reports_of(workers: Workers, meter: Meter) -> ReportExchange:
    """The exchange of reports between these workers."""
    return ReportExchange(workers, meter) if workers.peers is None else PeerReports(workers, meter, workers.peers)
