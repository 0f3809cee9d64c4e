"""The event log of a simulated run on servers, as workers and the first server of a real run write it."""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, Final, final

from msgspec.structs import replace

from evenstep.core.coordinate import Answer, Arrival, Coordinator
from evenstep.sim.log import Log
from evenstep.sim.scenario import Scenario
from evenstep.sim.slot import VirtualSlot
from evenstep.telemetry import events

_TALLY_SECONDS: Final = 1.0
"""The virtual seconds between a server's records of its work."""


@final
class ServedLog:
    """The log of one run. `shard_bytes`: the size of a message of gradients to one server."""

    def __init__(
        self, log: Log, scenario: Scenario, coordinator: Coordinator, slots: Sequence[VirtualSlot], shard_bytes: float
    ) -> None:
        self._log = log
        self._scenario = scenario
        self._coordinator = coordinator
        self._slots = slots
        self._shard_bytes = shard_bytes
        served = scenario.scheme.served
        self._overlaps = served is not None and served.exchange == "overlapped"
        self._sizes: dict[int, list[int]] = {}
        """The sizes of all workers as last sent to each worker."""
        self._tallied = (0.0, 0, 0)
        """Time, version and pushes of the last tally."""

    def begins(self, slot: VirtualSlot, now: float) -> None:
        """A worker has joined."""
        self._log.run(slot.number, self._scenario)
        self.server(events.Joined, now, worker=slot.number, incarnation=slot.incarnation)

    def server(self, kind: type[events.ServerEvent], now: float, **about: Any) -> None:  # noqa: ANN401 - fields of it
        """Record an event of the server."""
        self._log.server.record(kind(at=now, version=self._coordinator.version, **about))

    def started(self, slot: VirtualSlot, now: float) -> None:
        self._log.started(slot.worker, slot.iterations, now)

    def sent(self, slot: VirtualSlot, arrival: Arrival, now: float) -> None:
        """A push is sent: keep the record of its iteration."""
        slot.pushed = events.IterationDone(
            worker=slot.number,
            iteration=slot.iterations - 1,
            epoch=slot.epoch,
            at=slot.entered,
            samples=arrival.samples,
            cost=slot.load if self._scenario.told_costs else None,
            iteration_seconds=now - slot.entered,
            input_seconds=slot.began - slot.entered,
            compute_seconds=arrival.row[1] / 1e6,
            wait_seconds=0.0,
            comm_seconds=0.0,
            row=arrival.row,
            factors=astuple(slot.worker.factors),
        )

    def answered(self, slot: VirtualSlot, answer: Answer, now: float, *, took: float) -> None:
        """An answer ends the iteration that was pushed; the worker has waited `took` seconds for it."""
        pushed, commit, release = slot.pushed, slot.commit, answer.release
        if pushed is None:
            return
        assert pushed.at is not None
        waited = 0.0 if release is None else min(release.held_seconds, took)
        self._log.workers[slot.number].record(
            replace(
                pushed,
                iteration_seconds=pushed.iteration_seconds if self._overlaps else now - pushed.at,
                wait_seconds=waited,
                comm_seconds=took - waited,
                staleness=None if commit is None else commit.staleness,
                behind=None if commit is None else commit.behind,
                share=None if commit is None else commit.share,
                lead=None if release is None else release.lead,
                bound=None if release is None else release.bound,
            )
        )
        slot.pushed = slot.commit = None

    def planned(self, slot: VirtualSlot, by_worker: dict[int, int]) -> None:
        """A worker is sent the sizes; recorded if they differ from the last ones."""
        sizes = [by_worker.get(worker, 0) for worker in range(len(self._slots))]
        if sizes != self._sizes.get(slot.number):
            self._sizes[slot.number] = sizes
            self._log.plan(slot.number, slot.iterations, sizes)

    def tally(self, now: float, *, saved: int, every_seconds: float = _TALLY_SECONDS) -> None:
        """Record the server's work since the last tally, if that was long enough ago.

        `saved` gradient messages were not sent because several pushes travelled as one.
        """
        since, commits, pushes = self._tallied
        if now - since < every_seconds:
            return
        version = self._coordinator.version
        pushed = sum(slot.done.iterations for slot in self._slots) - saved
        self._tallied = (now, version, pushed)
        if version == commits:
            return
        self.server(
            events.Tallied,
            now,
            seconds=now - since,
            commits=version - commits,
            bytes=round((pushed - pushes) * self._shard_bytes),
            samples=self._coordinator.samples,
        )

    def end(self, now: float, *, saved: int) -> None:
        for slot in self._slots:
            if slot.here_since is not None:
                self._log.end(slot.number, now)
        self.tally(now, saved=saved, every_seconds=0.0)
