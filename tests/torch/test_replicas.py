"""Replicas that part, as a script changes something on one worker alone, are refused within twice the iterations."""

import pytest
from support import replicas
from support.processes import results, run_workers

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("replicas")]


@pytest.fixture(scope="module")
def found():
    return results(run_workers(replicas.together, replicas.WORKERS))


@pytest.mark.parametrize("change", replicas.ALONE)
def test_a_change_on_one_worker_alone_is_refused_on_all(found, change):
    assert len({each[change] for each in found}) == 1
    said, iteration = found[0][change]
    assert said.startswith("worker 1 has other weights in ")
    assert "on every worker alike" in said
    assert iteration <= 20


def test_weights_that_are_rounded_otherwise_are_not_refused(found):
    assert {each["round_otherwise"] for each in found} == {(None, 40)}


def test_no_checkpoint_of_replicas_that_have_parted_is_saved(tmp_path):
    for said, restored in results(run_workers(replicas.save_apart, replicas.WORKERS, str(tmp_path))):
        assert said.startswith("worker 1 has other weights in 2.bias")
        assert restored is None


def test_a_script_that_passes_over_the_error_steps_no_more():
    assert results(run_workers(replicas.go_on_after_it, replicas.WORKERS)) == [(0, 2)] * 3


def test_a_script_that_lets_go_of_a_closed_run_ends_it():
    # The summary is printed then; a process that is killed, as Ray's workers are, collects no more garbage.
    assert results(run_workers(replicas.let_go, replicas.WORKERS)) == [True] * 3


def test_gradients_that_a_script_sets_by_hand_are_refused():
    for said, iteration in results(run_workers(replicas.by_hand, replicas.WORKERS)):
        assert "no backward of a prepared model has summed" in said
        assert iteration == 2


def test_a_function_that_is_compiled_with_its_backward_runs():
    assert results(run_workers(replicas.compiled_with_its_backward, replicas.WORKERS)) == [10] * 3
