"""What the workers of a run wrote down."""

from evenstep.telemetry import read_events


def by_worker(run_dir):
    """Every worker's events, of which the first is `run`."""
    events = []
    for event in read_events(run_dir):
        if event.kind == "run":
            events.append([])
        events[-1].append(event)
    return events
