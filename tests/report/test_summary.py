import json

import pytest
from support import made_log
from support.records import run_from

from evenstep.core.errors import ConfigError
from evenstep.report.recorded import read_run
from evenstep.report.summary import summarise, summary_of
from evenstep.report.timeline import notes_of, seconds_until

EQUAL, BALANCED = (12, 12, 12), (16, 16, 4)
RUN = {"event": "run", "worker": 0, "scheme": "bsp", "global_batch_size": 36, "iterations_per_epoch": 6}


def test_a_run_in_a_few_numbers(events_of):
    summary = summary_of(run_from(events_of("bsp", EQUAL)))
    # Ten iterations of 48 ms of compute and two halves, each with 10 ms of the rest.
    seconds = 10 * 0.058 + 2 * 0.034
    assert summary.scheme == "bsp"
    assert (summary.iterations, summary.global_batch_size) == (12, 36)
    assert summary.training_seconds == pytest.approx(seconds)
    assert summary.samples_per_second == pytest.approx((10 * 36 + 2 * 18) / seconds)
    fast, _, slow = summary.workers
    assert slow.waiting_share == 0
    assert fast.waiting_share == pytest.approx(11 * 0.036 / seconds)
    assert fast.compute_seconds == pytest.approx(11 * 0.012 / 12)
    assert [worker.samples for worker in summary.workers] == [132, 132, 132]


def test_the_batch_sizes_are_those_planned_first_and_last(events_of):
    summary = summary_of(run_from(events_of("lb-bsp", EQUAL, BALANCED)))
    assert [(each.first_batch_size, each.last_batch_size) for each in summary.workers] == [(12, 16), (12, 16), (12, 4)]


def test_only_iterations_that_every_worker_finished_count(events_of):
    events = list(events_of("bsp", EQUAL))
    assert summary_of(run_from(events[:-3])).iterations == 9


def test_a_worker_started_again_counts_from_its_last_start(events_of):
    run = run_from([*events_of("bsp", EQUAL), *events_of("lb-bsp", BALANCED)])
    assert run.scheme == "lb-bsp"
    assert {len(done) for done in run.counted.values()} == {12}
    assert [each.batch_sizes for each in run.planned] == [list(BALANCED)]


def test_workers_that_a_later_start_lacks_do_not_count():
    first, second = (list(made_log.worker_events(worker, parts=[(0.0, 0.01, 0.0)] * 2)) for worker in range(2))
    again = made_log.worker_events(0, parts=[(0.0, 0.01, 0.0)], sizes=[(20,)] * 6)
    run = run_from([*first, *again, *second])
    assert (run.workers, len(run.counted[0]), [each.batch_sizes for each in run.planned]) == ([0], 6, [[20]])
    assert summary_of(run).workers[0].last_batch_size == 20


def test_reads_a_run_directory(events_of, tmp_path):
    for event in events_of("bsp", EQUAL):
        if event["event"] == "run":
            file = tmp_path / f"worker-{event['worker']}.jsonl"
        with file.open("a") as lines:
            lines.write(json.dumps(event) + "\n")
    assert summarise(tmp_path) == summary_of(run_from(events_of("bsp", EQUAL)))


@pytest.mark.parametrize(
    ("lines", "fragment"),
    [
        ([], "no worker has finished an iteration"),
        ([RUN], "no worker has finished an iteration"),
        ([{"event": "run"}], "has no 'worker': it was written by another version"),
        ([RUN, {"event": "iteration", "worker": 0, "iteration": 0}], "has no 'at': it was written by another version"),
    ],
)
def test_what_cannot_be_reported_is_one_sentence(lines, fragment, tmp_path):
    (tmp_path / "worker-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match=fragment):
        read_run(tmp_path)


def test_a_directory_without_events_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no worker"):
        summarise(tmp_path)


def noted(worker, iteration, accuracy):
    about = {"worker": worker, "event": "note", "iteration": iteration, "at": 101.0, "samples": 10}
    return {**about, "values": {"accuracy": accuracy}}


def test_time_to_an_accuracy_is_the_first_workers_and_counts_training_only(events_of):
    notes = [noted(0, 5, 0.9), noted(1, 5, 0.99), noted(0, 11, 0.96)]
    run = run_from([*events_of("bsp", EQUAL), *notes])
    assert seconds_until(run, "accuracy", 0.9) == pytest.approx(5 * 0.058 + 0.034)
    assert seconds_until(run, "accuracy", 0.95) == pytest.approx(10 * 0.058 + 2 * 0.034)
    assert seconds_until(run, "accuracy", 0.97) is None
    assert [value for _, value in notes_of(run, "accuracy", 0)] == [0.9, 0.96]
    assert len(notes_of(run, "accuracy")) == 3


def test_replicas_that_all_ended_and_began_anew_are_judged_since_then():
    """The iterations of one and a half of them come again under the same numbers."""
    lives = [list(made_log.worker_events(worker, parts=[(0.0, 0.01, 0.0)] * 3)) for worker in range(3)]
    events = [dict(event, engine="elastic") if event["event"] == "run" else event for life in lives for event in life]
    run = run_from([*events[: len(lives[0]) + 6], *events])
    assert [len(done) for done in run.counted.values()] == [12] * 3
    assert summary_of(run).iterations == 12
