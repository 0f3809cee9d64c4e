"""Records events. The JSONL files of a run directory are the source of truth for reports and replays."""

from evenstep.telemetry.events import SCHEMA, Event
from evenstep.telemetry.reading import ROLES, Role, RunTail, Tail, event_files, read_events
from evenstep.telemetry.recorder import JsonlRecorder, Recorder, Silent

__all__ = [
    "ROLES",
    "SCHEMA",
    "Event",
    "JsonlRecorder",
    "Recorder",
    "Role",
    "RunTail",
    "Silent",
    "Tail",
    "event_files",
    "read_events",
]
