"""Schemes without servers in virtual time: the steps of the runtime's collective and local engines, in their order."""

from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from typing import final

import numpy as np
import numpy.typing as npt

from evenstep.core.fragments import due_fragments, leaving_fragments
from evenstep.core.load.first_period import FIRST_STEPS, compares_first_steps, first_period_sizes
from evenstep.core.load.limits import SizeLimits
from evenstep.core.samples import CostSharing, EpochCosts, Lookahead, PerSample, Share
from evenstep.core.values import Basis, IntArray, Reports
from evenstep.schemes.scheme import NARROWING
from evenstep.sim.log import Log
from evenstep.sim.network import Network
from evenstep.sim.parts import Parts, parts_by_count, parts_by_position
from evenstep.sim.result import SimulatedRun, SimulatedWorker
from evenstep.sim.scenario import Scenario
from evenstep.sim.worker import VirtualWorker
from evenstep.telemetry.events import IterationDone

_PerWorker = npt.NDArray[np.float64]


@final
class CollectiveRun:
    """All workers behind a barrier: in every iteration, or at the end of each period under local SGD.

    An iteration takes as long as its slowest worker, plus the sum of the gradients. The sizes of an iteration are based
    on the reports of all earlier iterations, as in the runtime on a CPU.
    """

    def __init__(self, scenario: Scenario, log: Log | None) -> None:
        scheme, count = scenario.scheme, len(scenario.cluster)
        self._scenario = scenario
        self._log = log
        self._workers = [
            VirtualWorker(spec, number, scheme, by_cost=scenario.told_costs)
            for number, spec in enumerate(scenario.cluster.workers)
        ]
        self._costs = scenario.sample_costs()
        self._per_sample = PerSample()
        self._reports = log is not None or scenario.uses_reports
        self._policy = scheme.policy(count)
        self._problem = scenario.problem
        self._limits = SizeLimits(scheme.load, scenario.problem)
        self._comm_seconds = _communication(scenario)
        self._compare_seconds = Network(scenario.cluster, message_bytes=0).small_exchange_seconds()
        self._arrives = 0.0
        self._now = 0.0
        self._number = 0
        self._epoch = 0
        self._planned: IntArray = np.zeros(0, dtype=np.int64)
        self._basis: Basis = "speed"
        self._weights: IntArray | None = None
        # Since the last meeting, by worker: samples, loads, seconds and the largest micro-batch; and iterations.
        self._since_meeting = np.zeros(count, dtype=np.int64)
        self._loads: _PerWorker = np.zeros(count)
        self._spent: _PerWorker = np.zeros(count)
        self._held: _PerWorker = np.zeros(count)  # Of the waiting for the others' first steps in a first period.
        self._largest: list[float] = [0] * count
        self._passes = 0
        # Over the whole run.
        self._samples = np.zeros(count, dtype=np.int64)
        self._compute: _PerWorker = np.zeros(count)
        self._wait: _PerWorker = np.zeros(count)
        self._comm = 0.0
        self._meetings = 0

    def finish(self) -> SimulatedRun:
        """Run to the end."""
        if self._log is not None:
            for worker in range(len(self._workers)):
                self._log.run(worker, self._scenario)
        while self._number < self._scenario.iterations:
            self._run_epoch(self._scenario.iterations)
            self._epoch += 1
        return self._result()

    def _run_epoch(self, iterations: int) -> None:
        scheme, ledger, minimum = self._scenario.scheme, self._scenario.ledger(), int(self._problem.minimum[0])
        costs = None if self._costs is None else self._costs.of_epoch(self._epoch)
        sharing = None if costs is None or not self._scenario.by_cost else self._sharing(costs, minimum)
        slices = Lookahead(ledger, worker=0, sizes=self._allocate, depth=0, minimum=minimum, sharing=sharing)

        def parts_of(share: Share, positions: Sequence[tuple[int, ...]]) -> Parts:
            if costs is None:
                return parts_by_count(share.sizes, minimum, scheme.micro_batch)
            return parts_by_position(share, positions, costs, sharing, scheme.micro_batch)

        while self._number < iterations and (share := slices.share()) is not None:
            parts, begun = parts_of(share, slices.all_positions if costs else ()), 0
            if self._compares(share):
                share, positions = self._compare(share, slices, parts)
                parts, begun = parts_of(share, positions), FIRST_STEPS
            slices.advance()
            self._compute_on(share, parts, begun)
            period, fragments = scheme.period_in_iterations, scheme.fragments
            if leaving_fragments(share, period, fragments, scheme.delay):
                self._arrives = self._now + float(self._spent.max()) + self._comm_seconds(1) - self._comm_seconds(0)
            due = due_fragments(share, period, fragments)
            if self._number == iterations or share.ends_epoch:
                self._meet(share, parts, fragments)
            elif due:  # What has been under way since before is not sent then.
                self._meet(share, parts, 0 if scheme.delay else len(due))
            # After the last slice of an epoch too, as the loader does.
            slices.replan()

    def _sharing(self, costs: EpochCosts, minimum: int) -> CostSharing:
        return CostSharing(
            costs=costs,
            minimum=minimum,
            maximum=lambda: self._problem.maximum,
            most=self._limits.most,
            weights=lambda: self._weights,
            per_sample=self._per_sample,
        )

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

    def _compares(self, share: Share) -> bool:
        scheme = self._scenario.scheme
        size, met = scheme.micro_batch or 1, self._meetings > 0
        return scheme.steps == "speed" and compares_first_steps(
            self._problem, share.sizes, size, basis=self._basis, met=met
        )

    def _compare(self, share: Share, slices: Lookahead, parts: Parts) -> tuple[Share, list[tuple[int, ...]]]:
        """Compute the first steps, and divide the rest of the period; returns its share, and all workers' positions."""
        self._start()
        for step in range(FIRST_STEPS):
            spent = self._spend([amounts[step : step + 1] for amounts in parts.amounts], parts.largest)
        self._held = self._spent.max() - self._spent + self._compare_seconds
        scheme, count = self._scenario.scheme, len(self._workers)
        samples = np.full(count, scheme.micro_batch)
        taken, times = FIRST_STEPS * samples, np.rint(spent * 1e6).astype(np.int64)
        sizes = first_period_sizes(scheme.policy(count), self._problem, share.sizes, taken, samples, times)
        begun = [own[:few] for own, few in zip(slices.all_positions, taken.tolist(), strict=True)]
        share = slices.redivide(sizes, taken)
        rest = zip(begun, slices.all_positions, strict=True)
        return share, [(*few, *(each for each in own if each not in few)) for few, own in rest]

    def _start(self) -> None:
        if self._log is not None:
            for worker, own in zip(self._workers, self._spent.tolist(), strict=True):
                self._log.started(worker, self._number, self._now + own)

    def _spend(self, amounts: Sequence[Sequence[float]], largest: Sequence[float]) -> _PerWorker:
        """Compute these batches of each worker; returns the seconds that they take."""
        each = zip(self._workers, amounts, largest, strict=True)
        seconds = np.array([worker.seconds(self._number, own, most) for worker, own, most in each])
        self._spent += seconds
        return seconds

    def _compute_on(self, share: Share, parts: Parts, begun: int) -> None:
        """Compute one iteration of each worker, of which so many steps are done."""
        if not begun:
            self._start()
        self._spend([amounts[begun:] for amounts in parts.amounts], parts.largest)
        self._loads += parts.loads
        self._largest = list(map(max, self._largest, parts.largest))
        self._since_meeting += share.sizes
        self._passes += 1
        self._number += 1

    def _meet(self, share: Share, parts: Parts, fragments: int) -> None:
        """All workers sum their gradients or exchange so many fragments of their models, and report."""
        slowest = float((self._spent + self._held).max())
        comm_seconds = self._comm_seconds(fragments) + max(self._arrives - self._now - slowest, 0.0)
        waited = slowest - self._spent
        reports = self._report() if self._reports else None
        if self._log is not None and reports is not None:
            self._write(parts, reports, slowest, comm_seconds)
        self._compute += self._spent
        self._wait += waited
        self._samples += self._since_meeting
        self._now += slowest + comm_seconds
        self._comm += comm_seconds
        self._meetings += 1
        if reports is not None:
            self._learn(share, reports)
        self._since_meeting[:] = 0
        self._loads[:] = self._spent[:] = self._held[:] = 0.0
        self._largest = [0] * len(self._workers)
        self._passes = 0

    def _report(self) -> Reports:
        passes, loads = self._passes, self._loads.tolist()
        if not self._scenario.told_costs:
            loads = [round(load / passes) for load in loads]
        measured = zip(self._workers, loads, self._spent.tolist(), self._largest, strict=True)
        rows = [worker.row(load, spent / passes, largest) for worker, load, spent, largest in measured]
        return Reports.from_table(np.array(rows, dtype=np.int64))

    def _learn(self, share: Share, reports: Reports) -> None:
        self._policy.observe(reports)
        if self._limits.report_all(reports.largest_size):
            self._problem = self._limits.stretched(self._problem)
        if share.loads is not None and self._scenario.scheme.micro_batch is None:
            self._per_sample.observe(share.sizes, share.loads.costs, reports.compute_microseconds)

    def _write(self, parts: Parts, reports: Reports, slowest: float, comm_seconds: float) -> None:
        assert self._log is not None
        longest = int(reports.compute_microseconds.max()) * self._passes / 1e6
        for worker, (samples, spent) in enumerate(zip(self._since_meeting.tolist(), self._spent.tolist(), strict=True)):
            row = reports.row(worker)
            compute = row[1] * self._passes / 1e6
            synchronised = slowest - spent + comm_seconds
            waited = min(longest - compute, synchronised)
            self._log.workers[worker].record(
                IterationDone(
                    worker=worker,
                    iteration=self._number - 1,
                    epoch=self._epoch,
                    at=self._now,
                    samples=samples,
                    cost=sum(parts.amounts[worker]) if self._scenario.told_costs else None,
                    basis=self._basis,
                    iteration_seconds=slowest + comm_seconds,
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
                    comm_seconds=self._comm,
                    present_seconds=self._now,
                )
                for worker in range(len(self._workers))
            ),
        )


def _communication(scenario: Scenario) -> Callable[[int], float]:
    """The seconds of an exchange of so many fragments, one by one, after the last worker is ready."""
    scheme = scenario.scheme
    network = Network(scenario.cluster, message_bytes=(scenario.message_bytes or 0) / scheme.fragments)
    narrowing = 1.0 if scheme.outer is None else NARROWING[scheme.outer.wire]
    # Models, but not those under way while workers compute, are summed on each host first.
    by_host = scheme.period is not None and not scheme.delay
    seconds = network.all_reduce_seconds(scenario.all_reduce, by_host=by_host, narrowing=narrowing)
    # Speeds are exchanged meanwhile, or afterwards if blocking.
    besides = network.small_exchange_seconds() if scheme.exchange == "blocking" else 0.0
    return lambda fragments: fragments * seconds + scenario.exchange_seconds + besides
