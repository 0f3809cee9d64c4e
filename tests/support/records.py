"""Checks what real and simulated runs record against the records that say what they may; makes records in tests."""

import json

from evenstep.report.recorded import recorded_run
from evenstep.telemetry import ROLES, event_files
from evenstep.telemetry.reading import event_of, whole_lines


def check_records(run_dir):
    """Every line of a run directory is a record; the kinds that were seen."""
    files = [path for role in ROLES for path in event_files(run_dir, role)]
    return {check_record(line) for path in files for lines in whole_lines(path) for line in lines.splitlines()}


def check_record(line):
    """A line is a record with nothing left over; its kind."""
    record, values = event_of(line), json.loads(line)
    assert record is not None, f"no record for {line}"
    fields = record.__struct_fields__
    assert set(values) <= {*fields, "event"}, f"{record.kind} has no place for all of {line}"
    assert all(getattr(record, name) == values[name] for name in fields if name in values)
    return record.kind


def records(lines):
    """The records of events as JSON holds them."""
    return [event_of(json.dumps(line).encode()) for line in lines]


def run_from(*groups):
    """The run of such events: the workers', the servers', the launcher's."""
    return recorded_run(*map(records, groups))
