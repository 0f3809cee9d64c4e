"""The state of each worker in a simulated run on servers: its place in the loop, and its sums so far."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from evenstep.cluster import Stay
from evenstep.core.coordinate import Answer, Apply, Arrival, Bundle
from evenstep.core.samples.claims import Claim
from evenstep.sim.network import Network
from evenstep.sim.result import SimulatedWorker
from evenstep.sim.worker import VirtualWorker
from evenstep.telemetry.events import IterationDone


@final
@dataclass(slots=True, eq=False)
class GroupServer:
    """The server of a group, on its workers' host: `bundle` decides which of their pushes travel as one.

    `version` is that of the weights sent to it last, and `arrives` the time of their arrival.
    """

    bundle: Bundle = field(default_factory=Bundle)
    version: int = -1
    arrives: float = 0.0


@final
@dataclass(slots=True, eq=False)
class VirtualSlot:
    """One worker of a run on servers.

    Attributes:
        group: The group server that it pushes to, if that makes a difference; else None.
        incarnation: The number of its stay; events for another incarnation are void.
        claims: The claims to compute on next, in order.
        computing, computed: The claim that it computes on, and the finished one that it has not pushed.
        load, seconds: The size and the time of its present or last computation: samples, including copies, or average
            samples if the worker knows costs.
        asking: Whether a push or its answer is under way.
        arrived_at: The time when its last push reached all servers; None while it is under way.
        answer: An answer under way to it.
        blocked_since: The time when it began to wait for an answer; None if it does not wait.
        idle_since: The time when it ran out of samples; None if it has some.
        version: The version of its weights; `handed_out_on` is that of the weights that it computes on.
        commit: The commit of its last push, until it is recorded.
        pushed: For the log, the iteration whose push is under way.
        iterations, staleness: The number of iterations begun, and the total staleness of its pushes.
        done: The other sums over the run.
    """

    number: int
    done: SimulatedWorker
    group: GroupServer | None = None
    worker: VirtualWorker = field(init=False)
    stays: Iterator[Stay] = field(default_factory=lambda: iter(()))
    incarnation: int = 0
    here_since: float | None = None
    leaves_at: float = math.inf
    # The loop.
    claims: tuple[Claim, ...] = ()
    computing: Claim | None = None
    computed: Claim | None = None
    asking: bool = False
    answer: Answer | None = None
    arrived_at: float | None = None
    blocked_since: float | None = None
    idle_since: float | None = None
    version: int = -1
    handed_out_on: int = -1
    load: float = 0
    began: float = 0.0
    entered: float = 0.0
    seconds: float = 0.0
    commit: Apply | None = None
    arrival: Arrival | None = None
    epoch: int = 0
    over: bool = False
    pushed: IterationDone | None = None
    iterations: int = 0
    staleness: int = 0

    def come(self, now: float, worker: VirtualWorker) -> None:
        """A new incarnation joins, like a new process that knows nothing about its speed."""
        self.incarnation += 1
        self.worker = worker
        self.here_since = self.idle_since = self.entered = now
        self.version = self.handed_out_on = -1
        self.over = False

    def go(self, now: float) -> None:
        """The worker leaves, and work that it had not pushed is lost."""
        self.incarnation += 1
        self.end(now)
        self.claims = ()
        self.computing = self.computed = self.answer = self.arrival = self.commit = self.pushed = None
        self.arrived_at = None
        self.asking = False

    def end(self, now: float) -> None:
        """Count unfinished waiting and idling, if the worker is here."""
        self.done.mean_staleness = self.staleness / max(self.done.iterations, 1)
        if self.here_since is None:
            return
        self.done.present_seconds += now - self.here_since
        if self.idle_since is not None:
            self.done.idle_seconds += now - self.idle_since
        if self.blocked_since is not None:
            self.done.wait_seconds += min(self._held(now), now - self.blocked_since)
        self.here_since = self.idle_since = self.blocked_since = None

    def end_exchange(self, answer: Answer, now: float) -> float:
        """Count the part of an exchange in which the worker waited for it; return its seconds."""
        self.asking = False
        took, waited, done, release = 0.0, 0.0, self.done, answer.release
        if self.blocked_since is not None:
            took = now - self.blocked_since
            self.blocked_since = None
        if release is not None:
            waited = min(release.held_seconds, took)
            if release.lead > done.largest_lead:
                done.largest_lead = release.lead
        if took:
            done.wait_seconds += waited
            done.comm_seconds += took - waited
        return took

    def pull_arrives(self, network: Network, version: int, now: float, *, whole: bool) -> float:
        """The time when this version's weights, sent now, reach the worker; a group server gets them once for all."""
        group = self.group
        if group is None:
            return network.pull_arrives(self.number, now, whole=whole)
        if group.version != version:
            group.version, group.arrives = version, network.pull_arrives(self.number, now)
        return max(now, group.arrives)

    def _held(self, now: float) -> float:
        """The seconds for which it was held in the present exchange; the rest is communication."""
        if self.answer is not None:
            return 0.0 if self.answer.release is None else self.answer.release.held_seconds
        return 0.0 if self.arrived_at is None else now - self.arrived_at
