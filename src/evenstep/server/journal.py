"""What shard 0 records of a run: events, totals, and the summary at its end."""

from collections.abc import Callable
from typing import Final, final

from evenstep.core.coordinate import Answer, Arrival
from evenstep.core.supervision import Why
from evenstep.core.sync.base import Regroup
from evenstep.protocol.run_spec import RunSpec
from evenstep.report.account import ServedTotals, served_summary_lines
from evenstep.server.all_shards import AllShards
from evenstep.telemetry import Recorder, events

_COMPUTE_MICROSECONDS: Final = 1
"""The column of a worker's row."""
TALLY_SECONDS: Final = 1.0
"""How often commits and bytes are recorded."""


@final
class Journal:
    """Records events and adds them up. Times are those that the coordinator was given, so that replays agree.

    Args:
        shards: Their version is recorded with each event.
        recorder: Receives events.
        say: Receives sentences for the user.
        name_lost: Whether the summary names lost workers.
        now: The present time.

    Attributes:
        events: The number of events so far.
    """

    def __init__(
        self, shards: AllShards, recorder: Recorder, say: Callable[[str], None], *, name_lost: bool, now: float
    ) -> None:
        self.events = 0
        self._shards = shards
        self._recorder = recorder
        self._say = say
        self._name_lost = name_lost
        self._lost = 0
        self._totals: ServedTotals | None = None
        self._tallied = now
        self._message_bytes = 0

    def define(self, spec: RunSpec, workers: int) -> None:
        """The first worker has described the run."""
        self._totals = ServedTotals(spec.problem.global_batch_size / workers)
        self._message_bytes = sum(each.nbytes for each in spec.layout.shards(self._shards.own.count))

    @property
    def totals(self) -> ServedTotals:
        """What the workers have done so far."""
        assert self._totals is not None
        return self._totals

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self._shards.own.version

    def record(self, event: events.ServerEvent) -> None:
        """Record an event."""
        self.events += 1
        self._recorder.record(event)

    def commits_lost(self, worker: int, now: float, *, has: int, lost: int) -> None:
        """A worker has weights of version `has`, which is newer than the servers' by `lost` commits."""
        if lost <= self._lost:
            return
        reported, self._lost = self._lost, lost
        self.record(events.CommitsLost(at=now, version=self.version, worker=worker, commits=lost))
        if not reported:  # Another worker may know of a few more, but one loss is reported once.
            self._say(f"{lost} commits are lost: the servers went back from version {has} to {has - lost}")

    def joined(self, worker: int, now: float, incarnation: int) -> None:
        self.record(events.Joined(at=now, version=self.version, worker=worker, incarnation=incarnation))
        self.totals.joined(worker)

    def left(self, worker: int, now: float, why: Why, *, early: bool) -> None:
        self.record(events.Left(at=now, version=self.version, worker=worker, why=why, early=early))
        if why is not Why.NEVER_CAME:
            self.totals.left(worker, why, early=early)

    def begun(self, worker: int, now: float, *, number: int, epoch: int, ahead: int) -> None:
        event = events.Begun(at=now, version=self.version, worker=worker, number=number, epoch=epoch, ahead=ahead)
        self.record(event)
        self.totals.began(worker, number)

    def pushed(self, arrival: Arrival, now: float) -> None:
        worker, samples, row = arrival.worker, arrival.samples, arrival.row
        self.record(
            events.Pushed(
                at=now,
                version=self.version,
                worker=worker,
                claim=arrival.claim,
                pulled=arrival.version,
                samples=samples,
                units=arrival.units,
                row=row,
            )
        )
        self.totals.pushed(worker, now, samples=samples, compute_seconds=row[_COMPUTE_MICROSECONDS] / 1e6)

    def fetched_ahead(self, worker: int, now: float, *, ahead: int) -> None:
        self.record(events.FetchedAhead(at=now, version=self.version, worker=worker, ahead=ahead))

    def rested(self, worker: int, now: float, *, done: int | None, ended: bool) -> None:
        self.record(events.Rested(at=now, version=self.version, worker=worker, done=done, ended=ended))

    def stopped(self, worker: int, now: float) -> None:
        self.record(events.Stopped(at=now, version=self.version, worker=worker))

    def regrouped(self, regroup: Regroup, now: float) -> None:
        self.record(events.Regrouped(at=now, version=self.version, groups=regroup.groups, reason=regroup.reason))

    def answered(self, answer: Answer, now: float) -> None:
        release = answer.release
        held, lead = (0.0, 0) if release is None else (release.held_seconds, release.lead)
        self.totals.answered(answer.worker, now, held=held, lead=lead, over=answer.over)

    def tally(self, now: float, samples: int, *, every: float = TALLY_SECONDS) -> None:
        """Record the commits and bytes of at least `every` seconds; `samples` counts from the beginning of the run."""
        if now - self._tallied < every:
            return
        seconds, self._tallied = now - self._tallied, now
        commits, messages = self._shards.take_counts()
        if commits:
            nbytes = messages * self._message_bytes
            event = events.Tallied(
                at=now, version=self.version, seconds=seconds, commits=commits, bytes=nbytes, samples=samples
            )
            self.record(event)

    def summarise(self) -> None:
        """Print the summary of the run, if it has begun."""
        spec = self._shards.own.spec
        if self._totals is not None and spec is not None:
            for line in served_summary_lines(self._totals, spec.scheme.name, name_lost=self._name_lost):
                self._say(line)
