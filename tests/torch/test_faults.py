"""Promise 4: a dead, stopped or disagreeing worker ends in an error that names it, before any weight changes."""

import re
import signal

import pytest
from support import training
from support.processes import results, run_workers
from support.training import Run

import evenstep

pytestmark = pytest.mark.multiprocess


def named(outcome):
    """The workers that an error names."""
    assert outcome.error is not None
    return [int(rank) for rank in re.findall(r"\d+", re.search(r"workers? ([\d, and]+)", outcome.error)[1])]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_worker_is_named_by_the_survivors(victim):
    run = Run(scripted=1, options={"timeout": 20.0})
    outcomes = run_workers(training.train_and_die, 3, run, victim, 7, "SIGKILL")
    assert outcomes[victim].exitcode == -signal.SIGKILL
    for rank in {0, 1, 2} - {victim}:
        assert outcomes[rank].error.startswith("WorkerLostError")
        assert named(outcomes[rank]) == [victim]


def test_a_worker_that_is_gone_when_others_measure_is_named():
    outcomes = run_workers(training.measure_and_die, 3, Run(options={"timeout": 20.0}), 1)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].error.startswith("WorkerLostError")
        assert named(outcomes[rank]) == [1]


def test_a_stopped_worker_is_named_within_the_timeout():
    run = Run(scripted=1, options={"timeout": 6.0})
    outcomes = run_workers(training.train_and_die, 3, run, 1, 7, "SIGSTOP", stopped=[1])
    for rank in (0, 2):
        assert outcomes[rank].error.startswith("WorkerLostError")
        assert "did not answer within 6 s" in outcomes[rank].error
        assert named(outcomes[rank]) == [1]
    assert outcomes[1].value is None
    assert outcomes[1].error is None


def test_a_worker_that_skips_a_batch_is_named():
    run = Run(scripted=1, options={"timeout": 20.0})
    outcomes = run_workers(training.skip_a_batch, 3, run, 1, 4)
    for outcome in outcomes:
        assert outcome.error == (
            "DisagreementError: worker 1 is at iteration 4 where the others are at 3: every worker must take every"
            " batch of the loader, run backward on it, and compute batches in their order (loader.computes says which"
            " one is computed)"
        )


def test_a_worker_that_weighs_by_units_alone_is_named_long_before_the_timeout():
    for outcome in run_workers(training.weigh_alone, 3, Run(scripted=1), 1, 4):
        assert outcome.error.startswith(
            "WorkerLostError: worker 1 weighs by 'units' where the others weigh by 'samples': call weigh_by on every"
        )


def test_a_worker_that_stops_before_it_can_say_what_differs_is_named_all_the_same():
    run = Run(scripted=1, options={"timeout": 6.0})
    outcomes = run_workers(training.skip_a_batch_and_stay_away, 3, run, 1, 4, stopped=[1])
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error.startswith("DisagreementError: worker 1 did not do the same iteration as the others")


CHANGES = [
    ({"scheme": "bsp"}, "the scheme 'bsp' where the others have 'lb-bsp': start every worker with the same"),
    ({"version": "0.0.9"}, f"version '0.0.9' of evenstep where the others have '{evenstep.__version__}'"),
    (
        {"batch_size": 7},
        "a loader with a batch size of 7 where the others have 5: start every worker with the same (sizes",
    ),
    ({"global_batch_size": 20}, "a global_batch_size of 20 where the others have none"),
    ({"samples": 91}, "a dataset of 91 samples where the others have 90"),
    ({"seed": 4}, "a seed of 4 for the order of samples where the others have 3"),
    ({"outputs": 2}, "a model of 14 parameters where the others have 7"),
    ({"turned": True}, "parameters whose shapes have the checksum "),
]


def test_workers_that_were_started_differently_are_named_with_what_differs():
    outcomes = run_workers(training.start_differently, 3, Run(), 2, [change for change, _ in CHANGES])
    for sentences in results(outcomes):
        for sentence, (_, says) in zip(sentences, CHANGES, strict=True):
            assert sentence.startswith(f"DisagreementError: worker 2 has {says}")


def test_an_error_of_one_worker_ends_all_with_its_message():
    told = results(run_workers(training.start_differently, 3, Run(), 2, [{"scheme": "lb-bps"}]))
    assert told[2] == ["ConfigError: there is no scheme 'lb-bps': did you mean 'lb-bsp'?"]
    assert told[:2] == [["ConfigError: worker 2: there is no scheme 'lb-bps': did you mean 'lb-bsp'?"]] * 2
