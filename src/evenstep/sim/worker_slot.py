"""What a simulated run on servers keeps of each worker: where it is in its loop, and what it has done so far."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import final

from evenstep.cluster import Stay
from evenstep.core.coordinate import Answer, Apply, Arrival, Bundle
from evenstep.core.samples.claims import Claim
from evenstep.sim.network import Network
from evenstep.sim.result import SimulatedWorker
from evenstep.sim.worker import VirtualWorker


@final
@dataclass(slots=True, eq=False)
class GroupServer:
    """The server of a group, on its workers' host: `bundle` says which of their pushes travel as one.

    `version` are the weights that were sent to it last, and `arrives` when they have reached it.
    """

    bundle: Bundle = field(default_factory=Bundle)
    version: int = -1
    arrives: float = 0.0


@final
@dataclass(slots=True, eq=False, kw_only=True)
class Pushed:
    """A push that is under way or was answered last, for the log."""

    number: int
    samples: int
    entered: float
    began: float
    row: tuple[int, ...]
    factors: tuple[float, ...]
    cost: float | None = None
    ended: float | None = None


@final
@dataclass(slots=True, eq=False)
class WorkerSlot:
    """One worker of a run on servers.

    Attributes:
        group: The group server that it pushes to, if that makes a difference; else None.
        incarnation: Counts its stays; an event for another incarnation is void.
        claims: What it computes on next, in order.
        computing, computed: The claim that it computes on, and the one that it has computed and not pushed.
        batch, seconds: The size, copies included, and the time of its present or last computation.
        cost: What that batch costs, in average samples; None if the worker is told no costs.
        asking: Whether a push or its answer is under way.
        arrived_at: When its last push reached all servers; None while it is under way.
        answer: An answer that is on its way.
        blocked_since: When it began to wait for an answer; None if it does not wait.
        idle_since: When it ran out of samples; None if it has some.
        version: The version of its weights; `handed_out_on` of those that it computes on.
        commit: The commit of its last push, until it is written down.
    """

    number: int
    group: GroupServer | None = None
    worker: VirtualWorker | None = None
    stays: Iterator[Stay] = field(default_factory=lambda: iter(()))
    incarnation: int = 0
    here_since: float | None = None
    leaves_at: float = math.inf
    # The loop.
    claims: deque[Claim] = field(default_factory=deque)
    computing: Claim | None = None
    computed: Claim | None = None
    asking: bool = False
    answer: Answer | None = None
    arrived_at: float | None = None
    blocked_since: float | None = None
    idle_since: float | None = None
    version: int = -1
    handed_out_on: int = -1
    batch: int = 0
    cost: float | None = None
    began: float = 0.0
    entered: float = 0.0
    seconds: float = 0.0
    commit: Apply | None = None
    arrival: Arrival | None = None
    epoch: int = 0
    over: bool = False
    pushed: Pushed | None = None
    # Over the whole run.
    iterations: int = 0
    pushes: int = 0
    samples: int = 0
    last_batch_size: int = 0
    compute_seconds: float = 0.0
    wait_seconds: float = 0.0
    comm_seconds: float = 0.0
    idle_seconds: float = 0.0
    present_seconds: float = 0.0
    staleness: int = 0
    largest_staleness: int = 0
    largest_lead: int = 0

    def come(self, now: float, worker: VirtualWorker) -> None:
        """A new incarnation joins, as a new process that knows nothing of its speed."""
        self.incarnation += 1
        self.worker = worker
        self.here_since = self.idle_since = self.entered = now
        self.version = self.handed_out_on = -1
        self.over = False

    def go(self, now: float) -> None:
        """The worker leaves, and what it had not pushed is lost."""
        self.incarnation += 1
        self.end(now)
        self.claims.clear()
        self.computing = self.computed = self.answer = self.arrival = self.commit = self.pushed = None
        self.arrived_at = None
        self.asking = False

    def end(self, now: float) -> None:
        """Count the waiting and idling that is not over; nothing if the worker is not here."""
        if self.here_since is None:
            return
        self.present_seconds += now - self.here_since
        if self.idle_since is not None:
            self.idle_seconds += now - self.idle_since
        if self.blocked_since is not None:
            self.wait_seconds += min(self._held(now), now - self.blocked_since)
        self.here_since = self.idle_since = self.blocked_since = None

    def end_exchange(self, answer: Answer, now: float) -> float:
        """Count the part of an exchange in which the worker waited for it; returns its seconds."""
        self.asking = False
        took, release = 0.0, answer.release
        if self.blocked_since is not None:
            took = now - self.blocked_since
            self.blocked_since = None
        if release is None:
            self.comm_seconds += took
        else:
            waited = min(release.held_seconds, took)
            self.wait_seconds += waited
            self.comm_seconds += took - waited
            self.largest_lead = max(self.largest_lead, release.lead)
        return took

    def pull_arrives(self, network: Network, version: int, now: float) -> float:
        """When the weights of this version, sent now, reach the worker; a group server gets them once for all."""
        group = self.group
        if group is None:
            return network.pull_arrives(self.number, now)
        if group.version != version:
            group.version, group.arrives = version, network.pull_arrives(self.number, now)
        return max(now, group.arrives)

    def _held(self, now: float) -> float:
        """How long it has been held in the present exchange; the rest is communication."""
        if self.answer is not None:
            return 0.0 if self.answer.release is None else self.answer.release.held_seconds
        return 0.0 if self.arrived_at is None else now - self.arrived_at

    def result(self) -> SimulatedWorker:
        """The sums over the run."""
        return SimulatedWorker(
            worker=self.number,
            samples=self.samples,
            iterations=self.pushes,
            last_batch_size=self.last_batch_size,
            compute_seconds=self.compute_seconds,
            wait_seconds=self.wait_seconds,
            comm_seconds=self.comm_seconds,
            idle_seconds=self.idle_seconds,
            present_seconds=self.present_seconds,
            mean_staleness=self.staleness / self.pushes if self.pushes else 0.0,
            largest_staleness=self.largest_staleness,
            largest_lead=self.largest_lead,
        )
