"""Promise 4: a dead, stopped or disagreeing worker ends in an error that names it, before any weight changes."""

import re
import signal

import pytest
from support import training
from support.processes import run_workers
from support.training import Run

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
    outcomes = run_workers(training.train_and_die, 3, run, 1, 7, "SIGSTOP", limit_seconds=30, stopped=[1])
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
        assert outcome.error.startswith("DisagreementError")
        assert named(outcome) == [1]
        assert "every batch" in outcome.error


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"scheme": "bsp"}, "bsp"),
        ({"version": "0.0.9"}, "0.0.9"),
        ({"batch_size": 7}, "batch_sizes="),
        ({"samples": 91}, "91"),
    ],
)
def test_workers_that_were_started_differently_are_named(change, fragment):
    outcomes = run_workers(training.start_differently, 3, Run(), 2, change)
    for outcome in outcomes:
        assert outcome.error.startswith("DisagreementError")
        assert named(outcome) == [2]
        assert fragment in outcome.error


def test_an_error_of_one_worker_ends_all_with_its_message():
    outcomes = run_workers(training.start_differently, 3, Run(), 2, {"scheme": "lb-bps"})
    assert outcomes[2].error == "ConfigError: there is no scheme 'lb-bps': did you mean 'lb-bsp'?"
    for outcome in outcomes[:2]:
        assert outcome.error == "ConfigError: worker 2: there is no scheme 'lb-bps': did you mean 'lb-bsp'?"
