"""What happened once in a run and deserves a line: workers that joined or left, failures, decisions."""

from dataclasses import dataclass
from typing import final

from evenstep.core.supervision import Why
from evenstep.telemetry import events
from evenstep.telemetry.events import Event, WorkerEvent


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """An event and its `text`. `worker`: whom it is about; `writer`: whose clock it has, None for servers and launcher.

    `routine`: it comes often, or a worker's state shows it too.
    """

    event: Event
    text: str
    worker: int | None
    writer: int | None
    routine: bool


def happening_of(event: Event) -> Happening | None:
    """The happening of an event; None if it deserves no line."""
    writer = event.worker if isinstance(event, WorkerEvent) else None
    text = _text(event)
    if text is None:
        return None
    about = (
        event.worker
        if isinstance(event, WorkerEvent | events.Joined | events.Left | events.CommitsLost | events.WorkerFailed)
        else None
    )
    routine = isinstance(event, events.Joined | events.SnapshotWritten | events.CheckpointDone | events.Disturbed)
    routine = routine or (isinstance(event, events.Left) and event.why == Why.DONE)
    return Happening(event=event, text=text, worker=about, writer=writer, routine=routine)


def _text(event: Event) -> str | None:
    match event:
        case WorkerEvent():
            return _worker_text(event)
        case events.Joined():
            return f"worker {event.worker} came"
        case events.Left():
            return f"worker {event.worker} {event.why}"
        case events.CommitsLost():
            return f"{event.commits} commits were lost"
        case events.WorkerFailed():
            return f"worker {event.worker} {event.how}"
        case events.ServersRestarted() | events.ServersLost() | events.ServerFailed():
            return event.text
    return _servers_text(event)


def _worker_text(event: WorkerEvent) -> str | None:
    match event:
        case events.RanOutOfMemory():
            return f"worker {event.worker} ran out of memory with {event.samples} samples"
        case events.CheckpointDone():
            return f"went on from the checkpoint {event.name}" if event.restored else f"checkpoint {event.name} saved"
        case events.Disturbed():
            how = slowness_text(event.factor, event.extra_seconds)
            return f"worker {event.worker} is made {how or 'slower no longer'}"
        case events.Failed():
            return f"worker {event.worker} failed: {event.type}" + (f": {event.text}" if event.text else "")
    return None


def _servers_text(event: Event) -> str | None:
    match event:
        case events.Regrouped():
            groups = "; ".join(" ".join(map(str, group)) for group in event.groups)
            return f"groups are now {groups} ({event.reason})"
        case events.SnapshotWritten():
            return f"snapshot at version {event.version}"
        case events.SnapshotFailed():
            return f"no snapshot could be written ({event.text})"
        case events.Restored():
            return f"went on from the snapshot of version {event.version}"
    return None


def slowness_text(factor: float, extra_seconds: float) -> str:
    """How much a worker is slowed, in a few words; empty if it is not."""
    parts = []
    if factor != 1:
        parts.append(f"{factor:.3g}x slower" if factor > 1 else f"{1 / factor:.3g}x faster")
    if extra_seconds:
        parts.append(f"slower by {1000 * extra_seconds:.3g} ms an iteration")
    return " and ".join(parts)
