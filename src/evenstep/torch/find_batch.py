"""Finds the largest batches of all workers under the script's own loop: hands out ever larger ones, ends the script."""

from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np

from evenstep.core.memory import LargestBatches
from evenstep.core.samples import EpochCosts, Ledger, Share, Shares
from evenstep.launch.found_batch import FoundBatch, FoundWorker
from evenstep.launch.launch_settings import FindBatch
from evenstep.torch.agree import Agreement
from evenstep.torch.processes.workers import Workers, gather
from evenstep.worker.earlier import identity_of
from evenstep.worker.tracker import Tracker

if TYPE_CHECKING:
    from evenstep.core.values import IntArray


@final
class Finder:
    """The `Shares` of a run that only finds batch sizes. Samples come again and again, so epochs never end.

    Args:
        asked: What `evenstep run --find-batch` asks for.
        agreement: What the workers have agreed on.
        balancer: Measures iterations and learns what fits.
        workers: All workers, who search together.
    """

    misses = 0

    def __init__(self, asked: FindBatch, agreement: Agreement, balancer: Tracker, workers: Workers) -> None:
        self._folders = [Path(folder) for folder in asked.folders]
        self._agreement = agreement
        self._balancer = balancer
        self._workers = workers
        self._search = LargestBatches.of(balancer.smallest_batch, np.minimum(agreement.limits, asked.largest))
        self._computed: IntArray | None = None
        self._length = 0
        self._costs: EpochCosts | None = None
        self._handed_out = 0
        self._iteration = 0

    def shares(self, ledger: Ledger, *, epoch: int, depth: int, costs: EpochCosts | None = None) -> Shares:
        """The shares of the next loop, which continue those of the last."""
        self._length, self._costs = ledger.length, costs
        return self

    def share(self) -> Share:
        """The batch to try next.

        Raises:
            SystemExit: The largest batches are found, and the script is over.
        """
        latest = self._balancer.latest
        if self._computed is not None and latest is not None:
            self._search.observe(self._computed, latest)
        if self._search.done:
            self._finish()
            raise SystemExit(0)
        own: tuple[int, ...] = ()
        sizes, computed = [], []
        for worker, size in enumerate(self._search.sizes.tolist()):
            positions = self._positions(size)
            sizes.append(len(positions))
            computed.append(len(positions) if self._costs is None else round(self._costs.samples(positions)))
            self._handed_out += len(positions)
            if worker == self._workers.rank:
                own = positions
        self._computed = np.array(computed, dtype=np.int64)
        self._iteration += 1
        return Share(
            iteration=self._iteration - 1,
            positions=own,
            samples=len(own),
            sizes=np.array(sizes, dtype=np.int64),
            cost=None if self._costs is None else self._costs.samples(own),
            padding=None if self._costs is None else self._costs.padding(own),
        )

    def replan(self) -> None:
        """Sizes are decided in `share`."""

    def advance(self) -> None:
        """The batch was counted in `share`."""

    def request(self, limit: int | None, *, whole: bool = False) -> None:
        """Nothing is fetched ahead."""
        return None

    def _positions(self, size: int) -> tuple[int, ...]:
        """The next positions that are this many samples, or cost at most as much as that many average ones."""
        most = size if self._costs is None else 4 * size
        positions = np.arange(self._handed_out, self._handed_out + most) % self._length
        if self._costs is not None:
            fits = self._costs.fitting(positions, size)
            positions = positions[: max(fits, self._balancer.smallest_batch)]
        return tuple(positions.tolist())

    def _finish(self) -> None:
        """Keep what was found, on the first worker; the others wait for it, so that none ends too early."""
        own, rank = self._agreement.own, self._workers.rank
        probe = self._balancer.meter.memory
        mine = self._agreement.workers[rank]
        records = gather(
            self._workers,
            {
                "device": mine["gpu"] or f"{mine['host']}{', emulated' if own.emulated else ''}",
                "identity": identity_of(mine["device"], own.hold),
                "memory_bytes": None if probe is None else probe.capacity_bytes,
            },
        )
        search = self._search
        if rank == 0:
            found = FoundBatch(
                workers=tuple(
                    FoundWorker(
                        worker=worker,
                        holds=int(search.holds[worker]),
                        more=search.more[worker],
                        samples_per_second=search.speeds[worker],
                        **record,
                    )
                    for worker, record in enumerate(records)
                ),
                global_batch_size=search.global_batch_size,
                by_cost=self._costs is not None,
            )
            for folder in self._folders:
                found.write(folder)
        gather(self._workers, {})
