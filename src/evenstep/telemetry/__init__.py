"""Records events. The JSONL files of a run directory are the source of truth for reports and replays."""

from evenstep.telemetry.events import SCHEMA, Event
from evenstep.telemetry.reading import ROLES, RunTail, event_files, read_events
from evenstep.telemetry.recorder import JsonlRecorder, Recorder, Silent

__all__ = [
    "ROLES",
    "SCHEMA",
    "Event",
    "JsonlRecorder",
    "Recorder",
    "RunTail",
    "Silent",
    "event_files",
    "read_events",
]
