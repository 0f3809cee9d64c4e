"""On hosts DistributedDataParallel sums gradients in a process group of evenstep's, which needs no pass of its own."""

import pytest
from support import beside_ddp
from support.processes import results, run_workers
from support.training import Run

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("workers", [2, 3])
def test_equal_sizes_have_the_bits_of_plain_ddp(workers):
    for value in results(run_workers(beside_ddp.train_beside_ddp, workers, Run(scheme="bsp", samples=30 * workers))):
        assert value["in_group"]
        assert value["equal"]


def test_the_scripts_own_ddp_may_be_prepared_again_with_a_hook_and_without():
    for value in results(run_workers(beside_ddp.prepare_again, 2, Run())):
        assert value["close"]
        assert value["hook_calls"] > 0
        assert "comm_hook=" in value["refused"]


def test_a_ddp_within_the_model_whose_gradients_are_views_is_refused():
    for value in results(run_workers(beside_ddp.nest, 2, Run())):
        assert "pass the DistributedDataParallel, or the model without it" in value


def test_complex_weights_are_those_of_one_process():
    assert max(results(run_workers(beside_ddp.train_complex, 2, Run(scripted=4)))) < 1e-13
