"""Surveys the workers under the script's own loop: hands out ever larger batches, then its own, and ends the script."""

import os
import platform
import time
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, final

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader

import evenstep
from evenstep.core.errors import ConfigError
from evenstep.core.load.limits import DEFAULT_MINIMUM
from evenstep.core.memory import LargestBatches
from evenstep.core.samples import EpochCosts, Ledger, Share, Shares
from evenstep.core.values import IntArray
from evenstep.launch.survey import Survey, SurveyedWorker
from evenstep.torch.data.sampling import Sampling
from evenstep.torch.processes.workers import Workers, gather, place_of
from evenstep.torch.refusals import require_loader
from evenstep.torch.request import RunRequest
from evenstep.worker.agreement import Agreed
from evenstep.worker.hold import identity_of
from evenstep.worker.tracker import Tracker

_WARM_UP: Final = 2
_ITERATIONS: Final = 50
"""Iterations with the script's own global batch, enough to see variations from one to the next."""


def to_be_surveyed(request: RunRequest) -> RunRequest:
    """Adapt the request to a survey: fetch in this process, without a scheme, independent of the script's sizes.

    Raises:
        ConfigError: The loader cannot be prepared, or is of data that each worker has to itself.
    """
    if request.private:
        raise ConfigError(
            "evenstep plan repeats the samples of a dataset that all workers have, and here each has data of its own:"
            " plan with a map-style dataset that all have, of samples of the same shapes"
        )
    loader = require_loader(request.loader)
    sampling = Sampling.of(loader)
    workers = place_of(group=request.process_group)[1] if sampling.whole and not sampling.lists else 1
    plain = DataLoader(
        loader.dataset,
        batch_size=DEFAULT_MINIMUM * workers,  # The script's own size may not fit, which must not stop the search.
        sampler=None if sampling.lists else sampling.sampler,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
    )
    return replace(
        request, loader=plain, scheme="bsp", batch_sizes=None, global_batch_size=None, run_dir=None, accumulation=1
    )


@final
class Surveyor:
    """The `Shares` of a survey run. Samples repeat, so epochs never end.

    Args:
        request: The script's arguments.
        agreement: The workers' agreement.
        tracker: Measures iterations and learns what fits.
        workers: All workers, who are surveyed together.
    """

    misses = 0

    def __init__(self, request: RunRequest, agreement: Agreed, tracker: Tracker, workers: Workers) -> None:
        assert request.launched.survey_up_to is not None
        self._request = request
        self._agreement = agreement
        self._tracker = tracker
        self._workers = workers
        most = np.minimum(agreement.limits, request.launched.survey_up_to)
        self._search = LargestBatches(tracker.smallest_batch, most)
        self._computed: IntArray | None = None
        self._handed_out_at = 0.0
        self._microseconds: list[list[int]] = []
        self._iteration_seconds: list[float] = []
        self._outside_seconds: list[float] = []
        self._length = 0
        self._costs: EpochCosts | None = None
        self._handed_out = 0
        self._iteration = 0

    def shares(self, ledger: Ledger, *, epoch: int, depth: int, costs: EpochCosts | None = None) -> Shares:
        """The shares of the next loop, which continue those of the last."""
        self._length, self._costs = ledger.length, costs
        return self

    def share(self) -> Share:
        """The batch to measure next.

        Raises:
            SystemExit: Everything has been measured, and the script is over.
        """
        if self._computed is not None and (reports := self._tracker.latest) is not None:
            if self._search.done:  # It was an iteration with the script's own global batch.
                now = self._tracker.iteration
                self._microseconds.append(reports.compute_microseconds.tolist())
                self._iteration_seconds.append(self._tracker.clock() - self._handed_out_at)
                self._outside_seconds.append(0.0 if now is None else now.input_seconds + now.script_seconds)
            else:
                self._search.observe(self._computed, reports)
        # A single worker waits for no other, so there is nothing to compare.
        wanted = 0 if self._workers.count == 1 else _WARM_UP + _ITERATIONS
        if self._search.done and len(self._microseconds) >= wanted:
            self._finish()
            raise SystemExit(0)
        own: tuple[int, ...] = ()
        sizes, computed = [], []
        for worker, size in enumerate(self._sizes().tolist()):
            # This many samples, or samples that cost at most as much as this many average ones.
            most = size if self._costs is None else 4 * size
            drawn = np.arange(self._handed_out, self._handed_out + most) % self._length
            if self._costs is not None:
                drawn = drawn[: max(self._costs.fitting(drawn, size), self._tracker.smallest_batch)]
            positions = tuple(drawn.tolist())
            sizes.append(len(positions))
            computed.append(len(positions) if self._costs is None else round(self._costs.samples(positions)))
            self._handed_out += len(positions)
            if worker == self._workers.rank:
                own = positions
        self._computed = np.array(computed, dtype=np.int64)
        self._iteration += 1
        self._handed_out_at = self._tracker.clock()
        return Share(
            iteration=self._iteration - 1,
            positions=own,
            samples=len(own),
            sizes=np.array(sizes, dtype=np.int64),
            cost=None if self._costs is None else self._costs.samples(own),
            padding=None if self._costs is None else self._costs.padding(own),
        )

    def replan(self) -> None:
        """Do nothing: sizes are decided in `share`."""

    def advance(self) -> None:
        """Do nothing: the batch was counted in `share`."""

    def request(self, limit: int | None, *, whole: bool = False) -> None:
        """Do nothing: nothing is fetched ahead."""
        return None

    def _sizes(self) -> IntArray:
        return self._search.shared(self._global_batch_size) if self._search.done else self._search.sizes

    @property
    def _global_batch_size(self) -> int:
        """The script's own; if it is not known or does not fit, a size that fits."""
        fits, asked = self._search.global_batch_size, self._request.global_batch_size
        if asked is None:
            asked = Sampling.of(self._request.loader).global_batch_size(self._workers.count)
        full = not any(self._search.more) and asked is not None and asked > self._search.holds.sum()
        return fits if asked is None or full else asked

    def _finish(self) -> None:
        """Save the measurements, on the first worker; the others wait for it, so that none ends too early."""
        workers, rank, search = self._workers, self._workers.rank, self._search
        told = gather(workers, self._told())
        if rank == 0:
            sizes = search.shared(self._global_batch_size).tolist()
            own = [[microseconds / 1e6 for microseconds in each] for each in self._microseconds[_WARM_UP:]]
            survey = Survey(
                workers=tuple(
                    SurveyedWorker(
                        worker=worker,
                        holds=int(search.holds[worker]),
                        more=search.more[worker],
                        points=tuple(points),
                        size=sizes[worker],
                        seconds=tuple(each[worker] for each in own),
                        **told[worker],
                    )
                    for worker, points in enumerate(search.points)
                ),
                global_batch_size=self._global_batch_size,
                largest_global_batch=min(search.global_batch_size, self._length),
                length=self._length,
                by_cost=self._costs is not None,
                iteration_seconds=median(self._iteration_seconds[_WARM_UP:] or [0.0]),
                gradient_bytes=sum(
                    parameter.numel() * parameter.element_size()
                    for model in self._request.models
                    for parameter in model.parameters()
                    if parameter.requires_grad
                ),
            )
            launched = self._request.launched
            for folder in filter(None, (launched.marks, launched.run_dir)):
                survey.write(Path(folder))
        gather(workers, {})

    def _told(self) -> dict[str, Any]:
        """The facts that only this worker knows."""
        own, mine = self._agreement.own, self._agreement.workers[self._workers.rank]
        memory, node = self._tracker.meter.memory, os.environ.get("GROUP_RANK", "0")
        several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
        return {
            # Nodes may have the same name.
            "host": f"{mine['host']} (node {node})" if several else mine["host"],
            "device": mine["gpu"] or ("emulated" if own.emulated else "cpu"),
            "processors": len(psutil.Process().cpu_affinity() or ()) or os.cpu_count() or 1,
            "versions": {
                "evenstep": evenstep.__version__,
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "numpy": np.__version__,
                "cuda": torch.version.cuda or "none",
            },
            "unix_seconds": time.time(),
            "identity": identity_of(mine["device"], own.hold),
            "memory_bytes": None if memory is None else memory.capacity_bytes,
            "outside_seconds": fmean(self._outside_seconds[_WARM_UP:] or [0.0]),
        }
