"""Schemes without servers in virtual time: what the collective and local engines of the runtime do, in their order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from typing import final

import numpy as np
import numpy.typing as npt

from evenstep.core.load.limits import SizeLimits
from evenstep.core.samples import EpochCosts, PerSample, Share, Slice, ends_period, short_slice_sizes
from evenstep.core.values import Basis, IntArray, Reports
from evenstep.sim.costs import CostedPart, CostShares, amounts_by_count
from evenstep.sim.log import Log
from evenstep.sim.network import Network
from evenstep.sim.result import SimulatedRun, SimulatedWorker
from evenstep.sim.scenario import Scenario
from evenstep.sim.worker import VirtualWorker, batch_of
from evenstep.telemetry.events import IterationDone

_Seconds = npt.NDArray[np.float64]
_PROGRESS_EVERY = 16


@final
class CollectiveRun:
    """All workers behind a barrier: at every iteration, or at the end of each period under local SGD.

    An iteration takes as long as its slowest worker, plus the sum of the gradients. The sizes of an iteration rest on
    the reports of all iterations before it, as in the runtime on a CPU.
    """

    def __init__(self, scenario: Scenario, log: Log | None) -> None:
        scheme, count = scenario.scheme, len(scenario.cluster)
        self._scenario = scenario
        self._log = log
        self._workers = [VirtualWorker(spec, number, scheme) for number, spec in enumerate(scenario.cluster.workers)]
        self._costs = scenario.sample_costs()
        self._per_sample = PerSample()
        self._latest: Reports | None = None
        # Reports are only made if something follows from them.
        self._reports = (
            log is not None
            or (self._costs is not None and scenario.by_cost)
            or scheme.load.follows_speed
            or any(worker.memory_model is not None for worker in self._workers)
        )
        self._policy = scheme.policy(count)
        self._problem = scenario.problem
        self._limits = SizeLimits(scheme.load, scenario.problem)
        self._minimum = int(self._problem.minimum[0])
        self._comm_seconds = _communication(scenario)
        self._now = 0.0
        self._number = 0
        self._epoch = 0
        self._planned: IntArray = np.zeros(0, dtype=np.int64)
        self._basis: Basis = "speed"
        self._weights: IntArray | None = None
        # Since the last meeting: samples with copies, seconds and the largest batch of each worker; iterations.
        self._batches = np.zeros(count, dtype=np.int64)
        self._spent: _Seconds = np.zeros(count)
        self._largest: list[int] = [0] * count
        self._passes = 0
        self._since_meeting = np.zeros(count, dtype=np.int64)
        self._part: CostedPart | None = None
        # Over the whole run.
        self._samples = np.zeros(count, dtype=np.int64)
        self._compute: _Seconds = np.zeros(count)
        self._wait: _Seconds = np.zeros(count)
        self._meetings = 0

    def finish(self, progress: Callable[[float], None]) -> SimulatedRun:
        """Run to the end; `progress` is called from time to time with the part that is done."""
        iterations = self._scenario.iterations
        if self._log is not None:
            for worker in range(len(self._workers)):
                self._log.run(worker, self._scenario)
        while self._number < iterations:
            self._run_epoch(iterations, progress)
            self._epoch += 1
        return self._result()

    def _run_epoch(self, iterations: int, progress: Callable[[float], None]) -> None:
        if self._costs is not None and self._scenario.by_cost:
            self._run_epoch_by_cost(self._costs.of_epoch(self._epoch), iterations, progress)
            return
        ledger = self._scenario.ledger()
        period = self._scenario.scheme.period or 1
        sizes = self._allocate()
        while self._number < iterations and (cut := ledger.take()) is not None:
            if cut.length < int(sizes.sum()):
                sizes = short_slice_sizes(sizes, cut.length, self._minimum)
            self._compute_on(sizes, cut)
            ends_epoch = cut.iteration == ledger.iterations - 1
            share = Share(iteration=cut.iteration, positions=(), samples=0, sizes=sizes, ends_epoch=ends_epoch)
            if ends_period(share, period) or self._number == iterations:
                self._meet()
            # After the last slice of an epoch too, as the loader does.
            sizes = self._allocate()
            if self._number % _PROGRESS_EVERY == 0:
                progress(self._number / iterations)

    def _run_epoch_by_cost(self, costs: EpochCosts, iterations: int, progress: Callable[[float], None]) -> None:
        scheme = self._scenario.scheme
        shares = CostShares(
            self._scenario.ledger(),
            self._allocate(),
            costs,
            minimum=self._minimum,
            maximum=lambda: self._problem.maximum,
            most=self._limits.most,
            weights=lambda: self._weights,
            per_sample=self._per_sample,
            micro_batch=scheme.micro_batch,
        )
        while self._number < iterations and (part := shares.take()) is not None:
            self._part, began = part, self._now
            seconds = [
                worker.cost_seconds(self._number, amounts, began)
                for worker, amounts in zip(self._workers, part.amounts, strict=True)
            ]
            self._count(part.sizes, seconds)
            self._meet()
            if self._latest is not None:
                shares.learn(part, self._latest)
            shares.resize(self._allocate())
            if self._number % _PROGRESS_EVERY == 0:
                progress(self._number / iterations)

    def _allocate(self) -> IntArray:
        """All workers' sizes for the next iteration."""
        if self._problem.epoch != self._epoch:
            self._problem = replace(self._problem, epoch=self._epoch)
        allocation = self._policy.allocate(self._problem)
        sizes, basis = allocation.sizes, allocation.basis
        if self._log is not None and (basis != self._basis or not np.array_equal(sizes, self._planned)):
            self._log.plan(0, self._number, sizes.tolist(), basis)
        self._planned, self._basis, self._weights = sizes, basis, allocation.weights
        return sizes

    def _compute_on(self, sizes: IntArray, cut: Slice) -> None:
        """One iteration of each worker, shared out by count."""
        number, began, minimum = self._number, self._now, self._minimum
        batches = [batch_of(size, minimum) for size in sizes.tolist()]
        of_workers = zip(self._workers, batches, self._spent.tolist(), strict=True)
        if self._costs is None:
            seconds = [worker.seconds(number, batch, began + spent) for worker, batch, spent in of_workers]
        else:
            epoch, micro_batch = self._costs.of_epoch(self._epoch), self._scenario.scheme.micro_batch
            amounts = amounts_by_count(epoch, cut, sizes, minimum=minimum, micro_batch=micro_batch)
            seconds = [
                worker.cost_seconds(number, own, began + spent, batch_size=batch)
                for (worker, batch, spent), own in zip(of_workers, amounts, strict=True)
            ]
        self._batches += batches
        self._largest = list(map(max, self._largest, batches))
        self._count(sizes, seconds)

    def _count(self, sizes: IntArray, seconds: Sequence[float]) -> None:
        """Each worker has computed on its samples for so many seconds."""
        if self._log is not None:
            self._report_slowness(self._log, self._now)
        self._spent += seconds
        self._passes += 1
        self._number += 1
        self._since_meeting += sizes

    def _report_slowness(self, log: Log, began: float) -> None:
        for number, (worker, spent) in enumerate(zip(self._workers, self._spent.tolist(), strict=True)):
            slowness = worker.news.of(self._number)
            if slowness is not None:
                log.disturbance(number, self._number, began + spent, slowness)

    def _meet(self) -> None:
        """All workers sum their gradients, or average their models, and report what they have measured."""
        slowest = float(self._spent.max())
        waited = slowest - self._spent
        reports = self._report() if self._reports else None
        if self._log is not None and reports is not None:
            self._write(reports, slowest)
        self._compute += self._spent
        self._wait += waited
        self._samples += self._since_meeting
        self._now += slowest + self._comm_seconds
        self._meetings += 1
        self._batches[:] = 0
        self._spent[:] = 0.0
        self._since_meeting[:] = 0
        self._largest = [0] * len(self._workers)
        self._passes = 0
        self._latest = reports
        if reports is not None:
            self._policy.observe(reports)
            if self._limits.report_all(reports.largest_size):
                self._problem = self._limits.stretched(self._problem)

    def _report(self) -> Reports:
        return Reports.from_table(np.array(list(self._rows()), dtype=np.int64))

    def _rows(self) -> Iterator[tuple[int, ...]]:
        passes, seconds = self._passes, self._spent.tolist()
        if self._part is not None:
            part = self._part
            for worker, load, spent, amounts in zip(self._workers, part.loads, seconds, part.amounts, strict=True):
                yield worker.cost_row(load, spent, max(amounts))
            return
        batches = self._batches.tolist()
        for worker, batch, spent, largest in zip(self._workers, batches, seconds, self._largest, strict=True):
            yield worker.row(round(batch / passes), spent / passes, largest)

    def _write(self, reports: Reports, slowest: float) -> None:
        assert self._log is not None
        longest = int(reports.compute_microseconds.max()) * self._passes / 1e6
        for worker, (samples, spent) in enumerate(zip(self._since_meeting.tolist(), self._spent.tolist(), strict=True)):
            row = reports.row(worker)
            compute = row[1] * self._passes / 1e6
            synchronised = slowest - spent + self._comm_seconds
            waited = min(longest - compute, synchronised)
            self._log.workers[worker].record(
                IterationDone(
                    worker=worker,
                    iteration=self._number - 1,
                    epoch=self._epoch,
                    at=self._now,
                    samples=samples,
                    cost=None if self._part is None else sum(self._part.amounts[worker]),
                    basis=self._basis,
                    iteration_seconds=slowest + self._comm_seconds,
                    input_seconds=0.0,
                    compute_seconds=compute,
                    wait_seconds=waited,
                    comm_seconds=synchronised - waited,
                    row=row,
                    factors=astuple(self._workers[worker].factors),
                )
            )

    def _result(self) -> SimulatedRun:
        if self._log is not None:
            for worker in range(len(self._workers)):
                self._log.end(worker, self._now)
        return SimulatedRun(
            scheme=self._scenario.scheme.name,
            global_batch_size=self._scenario.global_batch_size,
            seconds=self._now,
            samples=int(self._samples.sum()),
            commits=self._meetings,
            complete=True,
            workers=tuple(
                SimulatedWorker(
                    worker=worker,
                    samples=int(self._samples[worker]),
                    iterations=self._number,
                    last_batch_size=int(self._planned[worker]),
                    compute_seconds=float(self._compute[worker]),
                    wait_seconds=float(self._wait[worker]),
                    comm_seconds=self._meetings * self._comm_seconds,
                    present_seconds=self._now,
                )
                for worker in range(len(self._workers))
            ),
        )


def _communication(scenario: Scenario) -> float:
    """The seconds of an exchange after the last worker is ready."""
    network = Network(scenario.cluster, message_bytes=scenario.message_bytes or 0)
    seconds = network.all_reduce_seconds(scenario.all_reduce) + scenario.exchange_seconds
    # Speeds are exchanged meanwhile, or, if blocking, after it.
    return seconds + (network.small_exchange_seconds() if scenario.scheme.exchange == "blocking" else 0.0)
