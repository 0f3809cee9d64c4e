"""Single events in a run that deserve a line: workers that joined or left, failures, decisions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from evenstep.core.supervision import Why
from evenstep.telemetry import events
from evenstep.telemetry.events import Event, WorkerEvent


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """An event as `text`. `worker`: its subject; `writer`: the owner of its clock, None for servers and launcher.

    `routine`: it is frequent, or also visible in a worker's state.
    """

    event: Event
    text: str
    worker: int | None
    writer: int | None
    routine: bool


_TEXTS: Final[Mapping[type[Event], Callable[[Any], str]]] = {
    events.Joined: lambda event: f"worker {event.worker} came",
    events.Left: lambda event: f"worker {event.worker} {event.why}",
    events.CommitsLost: lambda event: f"{event.commits} commits were lost",
    events.WorkerFailed: lambda event: f"worker {event.worker} {event.how}",
    events.MembersChanged: lambda event: (
        f"members are now {' '.join(map(str, event.members))}"
        + (f" and {event.elsewhere} on other hosts" if event.elsewhere else "")
    ),
    events.NotCounted: lambda event: f"step {event.iteration} did not count for worker {event.worker}",
    events.ServersRestarted: lambda event: str(event.text),
    events.ServersLost: lambda event: str(event.text),
    events.ServerFailed: lambda event: str(event.text),
    events.RanOutOfMemory: lambda event: f"worker {event.worker} ran out of memory with {event.samples} samples",
    events.CheckpointDone: lambda event: (
        f"went on from the checkpoint {event.name}" if event.restored else f"checkpoint {event.name} saved"
    ),
    events.Disturbed: lambda event: f"worker {event.worker} is slowed {event.by or 'no longer'}",
    events.Failed: lambda event: (
        f"worker {event.worker} failed: {event.type}" + (f": {event.text}" if event.text else "")
    ),
    events.Regrouped: lambda event: (
        f"groups are now {'; '.join(' '.join(map(str, group)) for group in event.groups)} ({event.reason})"
    ),
    events.SnapshotWritten: lambda event: f"snapshot at version {event.version}",
    events.SnapshotFailed: lambda event: f"no snapshot could be written ({event.text})",
    events.Restored: lambda event: f"went on from the snapshot of version {event.version}",
}
"""The functions that make happenings, by the kind of event."""
_ROUTINE: Final = (events.Joined, events.NotCounted, events.SnapshotWritten, events.CheckpointDone, events.Disturbed)


def happening_of(event: Event) -> Happening | None:
    """The happening for an event; None if it deserves no line."""
    text = _TEXTS.get(type(event))
    if text is None:
        return None
    done = isinstance(event, events.Left) and event.why == Why.DONE
    return Happening(
        event=event,
        text=text(event),
        worker=getattr(event, "worker", None),
        writer=event.worker if isinstance(event, WorkerEvent) else None,
        routine=done or isinstance(event, _ROUTINE),
    )
