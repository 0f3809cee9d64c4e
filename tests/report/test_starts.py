"""A run directory that several starts have written to: the newest one counts, also where it is of fewer workers."""

from support.made_log import events_of, worker_events
from support.records import records, run_from

from evenstep.report.live import LiveRun
from evenstep.report.overview import overview_of
from evenstep.report.summary import summary_of

FAST = (0.001, 0.02, 0.001)


def later(events, seconds):
    for event in events:
        shift = {name: event[name] + seconds for name in ("at", "unix_seconds") if name in event}
        yield {**event, **shift}


def started_again(worker, workers, seconds=50.0, **more):
    return list(later(worker_events(worker, parts=(FAST,) * workers, **more), seconds))


def test_a_start_with_fewer_workers():
    first = [list(worker_events(worker, parts=(FAST,) * 4)) for worker in range(4)]
    again = [started_again(worker, 2, scheme="lb-bsp") for worker in range(2)]
    run = run_from([*first[0], *again[0], *first[1], *again[1], *first[2], *first[3]])
    assert (run.scheme, run.workers, run.global_batch_size) == ("lb-bsp", [0, 1], 20)
    assert summary_of(run).iterations == 12
    assert len(overview_of("run", run).summary.workers) == 2


def test_a_start_that_some_workers_have_not_come_far_in():
    live = LiveRun()
    for event in events_of((FAST,) * 3, sizes=[(10, 10, 10)] * 300):
        live.take(*records([event]), 1.0)
    assert live.view(1.0).iterations == 300
    for worker in range(2):
        for event in started_again(worker, 3)[: 5 - worker]:
            live.take(*records([event]), 2.0)
    # Nothing of worker 2's is of this start yet.
    view = live.view(2.0)
    assert [each.recent.worker for each in view.workers] == [0, 1]
    assert (view.iterations, view.samples) == (2, 50)
