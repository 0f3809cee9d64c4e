"""Checks what real and simulated runs write down against the records that say what they may write."""

from evenstep.telemetry import event_files, read_events
from evenstep.telemetry.events import parse_event

ROLES = ("worker", "server", "launcher")


def check_records(run_dir):
    """Every line of a run directory is a record; the kinds that were seen."""
    lines = (line for role in ROLES if event_files(run_dir, role) for line in read_events(run_dir, role=role))
    return {check_record(line) for line in lines}


def check_record(line):
    """A line is a record with nothing left over; its kind."""
    record = parse_event(line)
    assert record is not None, f"no record for {line}"
    fields = type(record).__slots__
    assert set(line) <= {*fields, "event", "worker", "server"}, f"{record.kind} has no place for all of {line}"
    assert all(getattr(record, name) == line[name] for name in fields if name in line)
    return record.kind
