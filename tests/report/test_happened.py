"""What a report tells of disturbances and failures, and when they were."""

import pytest
from support.made_log import events_of, worker_events
from support.records import records, run_from

from evenstep.report.live import LiveRun
from evenstep.report.overview import overview_of, values_of
from evenstep.report.page.tables import events_table

PARTS = ((0.001, 0.02, 0.001), (0.001, 0.03, 0.001), (0.001, 0.05, 0.001))
SLOWED = {"event": "disturbance", "worker": 2, "iteration": 3, "at": 100.2, "factor": 4.0, "extra_seconds": 0.0}
FAILED = {"event": "error", "worker": 1, "iteration": 11, "at": 100.6, "type": "ValueError", "text": "no good"}


def test_disturbances_and_failures_are_among_the_events_at_their_times():
    ended = {**SLOWED, "iteration": 6, "at": 100.4, "factor": 1.0}
    overview = overview_of("run", run_from([*events_of(PARTS), SLOWED, ended, FAILED]))
    assert [(event["event"], event["seconds"], event["text"]) for event in values_of(overview)["events"]] == [
        ("disturbance", pytest.approx(0.2), "worker 2 is slowed 4x"),
        ("disturbance", pytest.approx(0.4), "worker 2 is slowed no longer"),
        ("error", pytest.approx(0.6), "worker 1 failed: ValueError: no good"),
    ]
    row = {"second": "0.60", "what": "error", "about it": "worker 1 failed: ValueError: no good"}
    assert row in events_table(overview).rows


def test_a_time_is_that_of_its_writers_clock():
    other_host = list(worker_events(1, parts=PARTS))
    other_host[0] |= {"at": 700.0}  # Whose clock is 600 s ahead, at the same wall time.
    for event in other_host[1:]:
        if "at" in event:
            event["at"] += 600.0
    events = [*worker_events(0, parts=PARTS), *other_host, {**FAILED, "at": 700.6}, *worker_events(2, parts=PARTS)]
    (event,) = values_of(overview_of("run", run_from(events)))["events"]
    assert event["seconds"] == pytest.approx(0.6)


def test_who_failed_before_its_first_iteration_is_told_of_too():
    begun = next(worker_events(2, parts=PARTS))
    events = [*worker_events(0, parts=PARTS), *worker_events(1, parts=PARTS), begun, {**FAILED, "worker": 2}]
    (event,) = values_of(overview_of("run", run_from(events)))["events"]
    assert (event["worker"], event["seconds"]) == (2, pytest.approx(0.6))


def test_the_live_view_says_who_is_slowed_who_failed_and_who_has_finished():
    live = LiveRun()
    for worker in range(3):
        for event in worker_events(worker, parts=PARTS):
            live.take(*records([event]), 1.0)
    live.take(*records([SLOWED]), 1.0)
    assert [each.state for each in live.view(2.0).workers] == ["training", "training", "slowed 4x"]
    live.take(*records([{**SLOWED, "factor": 1.0, "extra_seconds": 0.05}]), 1.0)
    assert live.view(2.0).workers[2].state == "slowed 50 ms"
    live.take(*records([{"event": "end", "worker": 0, "at": 101.0}]), 2.0)
    live.take(*records([FAILED]), 2.0)
    live.take(*records([{"event": "end", "worker": 1, "at": 101.0}]), 2.0)
    view = live.view(60.0)
    assert [each.state for each in view.workers] == ["finished", "failed", "silent 59 s"]
    assert view.latest == ("worker 1 failed: ValueError: no good",)
    # Only who is there trains; of a run that is over, all are shown as they were.
    assert view.samples_per_second == pytest.approx(view.workers[2].recent.samples_per_second)
    live.take(*records([{"event": "end", "worker": 2, "at": 101.0}]), 2.0)
    assert live.view(60.0).samples_per_second == pytest.approx(3 * view.workers[2].recent.samples_per_second)
    # What the servers say comes from another file, which may be read later; and what was last is last.
    about = {"worker": 1, "version": 0}
    live.take(*records([{"event": "join", "at": 100.0, **about}]), 2.0)
    live.take(*records([{"event": "leave", "at": 100.1, "why": "was silent", **about}]), 2.0)
    live.take(*records([{"event": "leave", "at": 100.9, "why": "is done", **about, "worker": 0}]), 2.0)
    view = live.view(60.0)
    assert [each.state for each in view.workers] == ["finished", "failed", "finished"]
    assert view.latest == ("worker 1 was silent", "worker 1 failed: ValueError: no good")
    # Who is started again is there again.
    live.take(*records([{"event": "join", "at": 102.0, **about}]), 2.0)
    for event in worker_events(1, parts=PARTS):
        live.take(*records([event]), 60.0)
    assert live.view(60.0).workers[1].state == "training"
