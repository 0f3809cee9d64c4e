"""Each mistake with servers gets one sentence that says what to change."""

import pytest
from support import served_scripts
from support.processes import results
from support.served import run_served
from support.training import Run

pytestmark = pytest.mark.multiprocess


def sentence_of(outcomes):
    """What the only worker's ConfigError says."""
    kind, _, sentence = outcomes[0].error.partition(": ")
    assert kind == "ConfigError"
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("mistake", "fragment"),
    [
        ("several models", "one model and one optimizer"),
        ("a comm_hook", "comm_hook"),
        ("LBFGS", "LBFGS"),
        ("a lazy model", "lazy"),
        ("weights of the script", "weights goes with schemes that sum gradients behind a barrier"),
        ("a loader with its own loop", "has its own _get_iterator"),
        ("a batch sampler", "does not keep the lists of the loader's batch sampler together"),
    ],
)
def test_what_cannot_be_prepared(tmp_path, mistake, fragment):
    outcomes = run_served(served_scripts.prepare_wrongly, 1, Run(scheme="asp"), mistake, run_dir=tmp_path)
    assert fragment in sentence_of(outcomes)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [({"seed": "abc"}, "seed must be a whole number"), ({"scheme": "aspp"}, "there is no scheme 'aspp'")],
)
def test_a_wrong_argument_of_one_worker_is_told_on_all(tmp_path, mistake, says):
    run = Run(scheme="asp")
    outcomes = run_served(served_scripts.one_prepares_wrongly, 3, run, 1, mistake, run_dir=tmp_path)
    for rank, outcome in enumerate(outcomes):
        assert outcome.error.startswith(f"ConfigError: worker 1: {says}" if rank != 1 else f"ConfigError: {says}")


@pytest.mark.parametrize("missing", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment(tmp_path, missing):
    sentence = sentence_of(run_served(served_scripts.join_incompletely, 1, missing, run_dir=tmp_path))
    assert missing in sentence
    assert "torchrun" in sentence


@pytest.mark.parametrize(
    ("scheme", "mistake", "fragment"),
    [
        ("asp", "their own optimizer", "step the one that prepare returned"),
        ("asp", "another optimizer", "that was not given to prepare, and servers replace the weights"),
        ("asp:period=2", "another optimizer", "that was not given to prepare, and servers replace the weights"),
        ("asp", "another param group", "before prepare"),
        ("asp", "two steps", "step once for each batch"),
    ],
)
@pytest.mark.filterwarnings("ignore:the model's weights were changed between steps")
def test_a_mistake_in_the_loop(tmp_path, scheme, mistake, fragment):
    (said,) = results(run_served(served_scripts.misuse, 1, Run(scheme=scheme), mistake, run_dir=tmp_path))
    assert said.startswith("ConfigError")
    assert fragment in said


def test_loops_of_other_epochs(tmp_path):
    outcomes = run_served(served_scripts.set_other_epochs, 3, Run(scheme="bsp:engine=server"), 1, run_dir=tmp_path)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert errors
    for error in errors:
        assert error.startswith("DisagreementError")
        assert "loop over the same epochs on all workers" in error


def test_workers_with_other_models(tmp_path):
    outcomes = run_served(served_scripts.describe_other_models, 3, Run(scheme="asp"), 1, run_dir=tmp_path)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert errors
    for error in errors:
        assert error.startswith("DisagreementError: worker 1 has parameters whose shapes have the checksum ")


def test_workers_with_other_learning_rates(tmp_path):
    outcomes = run_served(served_scripts.step_at_another_rate, 2, Run(scheme="asp"), 1, run_dir=tmp_path)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    assert errors
    for error in errors:
        assert error.startswith("DisagreementError: this worker's learning rate in param group 0 is 0.")
