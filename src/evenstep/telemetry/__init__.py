"""Records what happened. The JSONL files of a run directory are the source of truth for reports and replays."""

from evenstep.telemetry.recorder import JsonlRecorder, Recorder, Silent, read_events

__all__ = ["JsonlRecorder", "Recorder", "Silent", "read_events"]
