"""Records what happened. The JSONL files of a run directory are the source of truth for reports and replays."""

from evenstep.telemetry.events import SCHEMA
from evenstep.telemetry.logged import Logged
from evenstep.telemetry.recorder import JsonlRecorder, Recorder, Role, Silent, event_files, read_events
from evenstep.telemetry.tail import RunTail, Tail

__all__ = [
    "SCHEMA",
    "JsonlRecorder",
    "Logged",
    "Recorder",
    "Role",
    "RunTail",
    "Silent",
    "Tail",
    "event_files",
    "read_events",
]
