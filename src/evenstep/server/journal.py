"""Shard 0's record of a run: events, totals, and the summary at its end."""

from collections.abc import Callable
from typing import Final, final

from evenstep.core.coordinate import Answer
from evenstep.protocol.run_spec import RunSpec
from evenstep.report.account.served import ServedTotals, served_summary_lines
from evenstep.server.all_shards import AllShards
from evenstep.telemetry import Recorder, events

TALLY_SECONDS: Final = 1.0
"""How often to record commits and bytes."""


@final
class Journal:
    """Records events and adds them up. Times are those that the coordinator was given, so that replays agree.

    Args:
        shards: Their version is recorded with each event.
        recorder: Receives events.
        say: Receives sentences for the user.
        now: The current time.

    Attributes:
        events: The number of events so far.
    """

    def __init__(self, shards: AllShards, recorder: Recorder, say: Callable[[str], None], *, now: float) -> None:
        self.events = 0
        self._shards = shards
        self._recorder = recorder
        self._say = say
        self._lost = 0
        self._totals: ServedTotals | None = None
        self._tallied = now
        self._counts = 0, 0.0
        """Commits and messages when they were last tallied."""
        self._message_bytes = 0

    def define(self, spec: RunSpec) -> None:
        """Learn the run that the first worker has described."""
        self._totals = ServedTotals(spec.problem.global_batch_size / self._shards.own.settings.workers)
        self._message_bytes = sum(each.nbytes for each in spec.layout.shards(self._shards.own.settings.count))

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self._shards.own.version

    def record(self, event: events.ServerEvent) -> None:
        """Record an event, and add it to the totals."""
        self.events += 1
        self._recorder.record(event)
        if self._totals is not None:
            self._totals.take(event)

    def commits_lost(self, worker: int, now: float, *, has: int, lost: int) -> None:
        """Record that a worker's weights, of version `has`, are newer than the servers' by `lost` commits."""
        if lost <= self._lost:
            return
        reported, self._lost = self._lost, lost
        self.record(events.CommitsLost(at=now, version=self.version, worker=worker, commits=lost))
        if not reported:  # Another worker may know of a few more, but one loss is reported once.
            self._say(f"{lost} commits are lost: the servers went back from version {has} to {has - lost}")

    def answered(self, answer: Answer, now: float) -> None:
        """Add to the totals that a worker was answered, which is no event."""
        assert self._totals is not None
        release = answer.release
        held, lead = (0.0, 0) if release is None else (release.held_seconds, release.lead)
        self._totals.answered(answer.worker, now, held=held, lead=lead, over=answer.over)

    def tally(self, now: float, samples: int, *, every: float = TALLY_SECONDS) -> None:
        """Record commits and bytes if `every` seconds have passed; `samples` counts from the beginning of the run."""
        if now - self._tallied < every:
            return
        seconds, self._tallied = now - self._tallied, now
        own, (before, moved_before) = self._shards.own, self._counts
        self._counts = own.commits, own.moved
        commits = own.commits - before
        if commits:
            nbytes = round((own.moved - moved_before) * self._message_bytes)
            event = events.Tallied(
                at=now, version=self.version, seconds=seconds, commits=commits, bytes=nbytes, samples=samples
            )
            self.record(event)

    def summarise(self) -> None:
        """Print the summary of the run, if it has begun."""
        own = self._shards.own
        if self._totals is not None and own.spec is not None:
            for line in served_summary_lines(self._totals, own.spec.scheme.name, name_lost=own.settings.name_lost):
                self._say(line)
