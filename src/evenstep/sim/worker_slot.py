"""What a simulated run on servers keeps of each worker: where it is in its loop, and what it has done so far."""

from collections import deque
from typing import TYPE_CHECKING, final

from evenstep.core.coordinate import Answer, Arrival, Update
from evenstep.sim.log import Log
from evenstep.sim.result import SimulatedWorker
from evenstep.sim.worker import VirtualWorker

if TYPE_CHECKING:
    from collections.abc import Iterator

    from evenstep.cluster import Stay
    from evenstep.core.samples.claims import Claim


@final
class Pushed:
    """A push that is under way, or was answered last, as far as it is written down."""

    __slots__ = ("began", "ended", "entered", "number", "row", "samples", "synchronised")

    def __init__(self, *, number: int, samples: int, entered: float, began: float, row: tuple[int, ...]) -> None:
        self.number = number
        self.samples = samples
        self.entered = entered
        self.began = began
        self.row = row
        self.synchronised = 0.0
        self.ended: float | None = None


@final
class WorkerSlot:
    """One worker of a run on servers.

    Attributes:
        incarnation: Counts its stays; an event for another one is void.
        claims: What it computes on next, one after another.
        computing, computed: What it computes on, and what it has computed on and not pushed; None for none.
        batch, seconds: What it computes on, copies included, and for how long, or has last.
        asking: Whether a push is under way, or its answer.
        arrived_at: When its last push reached all servers; None while it is under way.
        answer: An answer that is on its way.
        blocked_since: Since when it waits for an answer, where it does.
        idle_since: Since when it has nothing to compute on, where it has not.
        version: Of the weights that it has; `handed_out_on` of those that it computes on.
    """

    __slots__ = (
        "answer",
        "arrival",
        "arrived_at",
        "asking",
        "batch",
        "began",
        "blocked_since",
        "claims",
        "comm_seconds",
        "commit",
        "compute_seconds",
        "computed",
        "computing",
        "entered",
        "epoch",
        "handed_out_on",
        "here_since",
        "idle_seconds",
        "idle_since",
        "incarnation",
        "iterations",
        "largest_lead",
        "largest_staleness",
        "last_batch_size",
        "leaves_at",
        "number",
        "over",
        "present_seconds",
        "pushed",
        "pushes",
        "samples",
        "seconds",
        "staleness",
        "stays",
        "version",
        "wait_seconds",
        "worker",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.worker: VirtualWorker | None = None
        self.stays: Iterator[Stay] = iter(())
        self.incarnation = 0
        self.here_since: float | None = None
        self.leaves_at: float | None = None
        # The loop.
        self.claims: deque[Claim] = deque()
        self.computing: Claim | None = None
        self.computed: Claim | None = None
        self.asking = False
        self.answer: Answer | None = None
        self.arrived_at: float | None = None
        self.blocked_since: float | None = None
        self.idle_since: float | None = None
        self.version = -1
        self.handed_out_on = -1
        self.batch = 0
        self.began = self.entered = self.seconds = 0.0
        self.commit: Update | None = None
        self.arrival: Arrival | None = None
        self.epoch = 0
        self.over = False
        self.pushed: Pushed | None = None
        # Over the whole run.
        self.iterations = 0
        self.pushes = 0
        self.samples = 0
        self.last_batch_size = 0
        self.compute_seconds = self.wait_seconds = self.comm_seconds = 0.0
        self.idle_seconds = self.present_seconds = 0.0
        self.staleness = self.largest_staleness = self.largest_lead = 0

    def come(self, now: float, worker: VirtualWorker) -> None:
        """A new incarnation is here, as a new process that knows nothing of its speed."""
        self.incarnation += 1
        self.worker = worker
        self.here_since = self.idle_since = self.entered = now
        self.version = self.handed_out_on = -1
        self.over = False

    def go(self, now: float) -> None:
        """It is gone, and with it whatever it had in hand."""
        self.incarnation += 1
        self.end(now)
        self.claims.clear()
        self.computing = self.computed = self.answer = self.arrival = self.commit = self.pushed = None
        self.arrived_at = None
        self.asking = False

    def end(self, now: float) -> None:
        """Count what it was in the middle of; nothing, where it is not here."""
        if self.here_since is None:
            return
        self.present_seconds += now - self.here_since
        if self.idle_since is not None:
            self.idle_seconds += now - self.idle_since
        if self.blocked_since is not None:
            self.wait_seconds += min(self._held(now), now - self.blocked_since)
        self.here_since = self.idle_since = self.blocked_since = None

    def _held(self, now: float) -> float:
        """How long it has been held in the exchange that it is in the middle of; the rest is communication."""
        if self.answer is not None:
            return 0.0 if self.answer.release is None else self.answer.release.held_seconds
        return 0.0 if self.arrived_at is None else now - self.arrived_at

    def write(self, log: Log, ended: float, answer: Answer) -> None:
        """Write down the iteration that this answers."""
        pushed, commit, release = self.pushed, self.commit, answer.release
        if pushed is None:
            return
        held = 0.0 if release is None else release.held_seconds
        waited = min(held, pushed.synchronised)
        parts = {
            "iteration": pushed.number,
            "epoch": self.epoch,
            "at": pushed.entered,
            "samples": pushed.samples,
            "iteration_seconds": (ended if pushed.ended is None else pushed.ended) - pushed.entered,
            "input_seconds": pushed.began - pushed.entered,
            "compute_seconds": pushed.row[1] / 1e6,
            "wait_seconds": waited,
            "comm_seconds": pushed.synchronised - waited,
            "report": list(pushed.row),
        }
        more: dict[str, object] = {}
        if commit is not None:
            more |= {"staleness": commit.staleness, "behind": commit.behind, "share": commit.share}
        if release is not None:
            more |= {"lead": release.lead, "bound": release.bound}
        log.iteration(self.number, parts, more)
        self.pushed = self.commit = None

    def result(self) -> SimulatedWorker:
        """What it has done."""
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
