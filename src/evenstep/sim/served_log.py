"""What a simulated run on servers writes down, event by event, as workers and the first server of a real run do."""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Final, final

from evenstep.core.coordinate import Answer, Arrival, Coordinator
from evenstep.core.sync import Regroup
from evenstep.sim.log import Log
from evenstep.sim.scenario import Scenario
from evenstep.sim.worker_slot import Pushed, WorkerSlot
from evenstep.telemetry import events

_TALLY_SECONDS: Final = 1.0
"""How often a server writes down what it has done, in virtual seconds."""


@final
class ServedLog:
    """The log of one run. `shard_bytes`: the size of a message of gradients to one server."""

    def __init__(
        self, log: Log, scenario: Scenario, coordinator: Coordinator, slots: Sequence[WorkerSlot], shard_bytes: float
    ) -> None:
        self._log = log
        self._scenario = scenario
        self._coordinator = coordinator
        self._slots = slots
        self._shard_bytes = shard_bytes
        self._sizes: dict[int, list[int]] = {}
        """The sizes of all workers that each worker was sent last."""
        self._tallied = (0.0, 0, 0)
        """Time, version and pushes of the last tally."""

    def joined(self, slot: WorkerSlot, now: float) -> None:
        self._log.run(slot.number, self._scenario)
        version = self._coordinator.version
        self._log.server.record(
            events.Joined(at=now, version=version, worker=slot.number, incarnation=slot.incarnation)
        )

    def left(self, slot: WorkerSlot, now: float) -> None:
        version = self._coordinator.version
        self._log.server.record(events.Left(at=now, version=version, worker=slot.number, why="was taken away"))

    def began(self, slot: WorkerSlot, now: float, *, ahead: int) -> None:
        version, number = self._coordinator.version, slot.epoch
        self._log.server.record(
            events.Begun(at=now, version=version, worker=slot.number, number=number, epoch=number, ahead=ahead)
        )

    def rested(self, slot: WorkerSlot, now: float) -> None:
        self._log.server.record(events.Rested(at=now, version=self._coordinator.version, worker=slot.number))

    def regrouped(self, command: Regroup, now: float) -> None:
        version = self._coordinator.version
        self._log.server.record(events.Regrouped(at=now, version=version, groups=command.groups, reason=command.reason))

    def started(self, slot: WorkerSlot, now: float) -> None:
        """An iteration starts: report whether the worker's slowness has changed."""
        assert slot.worker is not None
        slowness = slot.worker.news.of(slot.iterations)
        if slowness is not None:
            self._log.disturbance(slot.number, slot.iterations, now, slowness)

    def sent(self, slot: WorkerSlot, arrival: Arrival) -> None:
        """A push is sent: keep what its iteration was."""
        slot.pushed = Pushed(
            number=slot.iterations - 1,
            samples=arrival.samples,
            entered=slot.entered,
            began=slot.began,
            row=tuple(arrival.row),
            factors=() if slot.worker is None else astuple(slot.worker.factors),
            cost=slot.cost,
        )

    def arrived(self, slot: WorkerSlot, arrival: Arrival, now: float) -> None:
        """A push reaches the coordinator."""
        self._log.server.record(
            events.Pushed(
                at=now,
                version=self._coordinator.version,
                worker=slot.number,
                claim=arrival.claim,
                pulled=arrival.version,
                samples=arrival.samples,
                units=arrival.units,
                row=arrival.row,
            )
        )

    def answered(self, slot: WorkerSlot, answer: Answer, now: float, *, took: float) -> None:
        """An answer ends the iteration that was pushed; the worker has waited `took` seconds for it."""
        pushed, commit, release = slot.pushed, slot.commit, answer.release
        if pushed is None:
            return
        waited = 0.0 if release is None else min(release.held_seconds, took)
        self._log.workers[slot.number].record(
            events.IterationDone(
                worker=slot.number,
                iteration=pushed.number,
                epoch=slot.epoch,
                at=pushed.entered,
                samples=pushed.samples,
                cost=pushed.cost,
                iteration_seconds=(now if pushed.ended is None else pushed.ended) - pushed.entered,
                input_seconds=pushed.began - pushed.entered,
                compute_seconds=pushed.row[1] / 1e6,
                wait_seconds=waited,
                comm_seconds=took - waited,
                row=pushed.row,
                factors=pushed.factors,
                staleness=None if commit is None else commit.staleness,
                behind=None if commit is None else commit.behind,
                share=None if commit is None else commit.share,
                lead=None if release is None else release.lead,
                bound=None if release is None else release.bound,
            )
        )
        slot.pushed = slot.commit = None

    def planned(self, slot: WorkerSlot, by_worker: dict[int, int]) -> None:
        """A worker is sent the sizes; written down if they differ from the last ones."""
        sizes = [by_worker.get(worker, 0) for worker in range(len(self._slots))]
        if sizes != self._sizes.get(slot.number):
            self._sizes[slot.number] = sizes
            self._log.plan(slot.number, slot.iterations, sizes)

    def tally(self, now: float, *, saved: int, every_seconds: float = _TALLY_SECONDS) -> None:
        """What the server has done since the last tally, if that was long enough ago.

        `saved` messages of gradients were not sent because several pushes travelled as one.
        """
        since, commits, pushes = self._tallied
        if now - since < every_seconds:
            return
        version = self._coordinator.version
        pushed = sum(slot.pushes for slot in self._slots) - saved
        self._tallied = (now, version, pushed)
        if version == commits:
            return
        self._log.server.record(
            events.Tallied(
                at=now,
                version=version,
                seconds=now - since,
                commits=version - commits,
                bytes=round((pushed - pushes) * self._shard_bytes),
                samples=self._coordinator.samples,
            )
        )

    def end(self, now: float, *, saved: int) -> None:
        for slot in self._slots:
            if slot.here_since is not None:
                self._log.end(slot.number, now)
        self.tally(now, saved=saved, every_seconds=0.0)
