"""Bounds hold: memory, minimum sizes, what may be combined, and who has the last word."""

import pytest
from support import training
from support.processes import results, run_workers
from support.training import Run

from evenstep.cluster import parse_cluster

SMALL_MEMORY = """
[devices.fast]
per_sample = "5 ms"
largest_batch = 7
[devices.slow]
per_sample = "20 ms"
[[workers]]
device = "fast"
[[workers]]
device = "slow"
count = 2
"""


@pytest.mark.multiprocess
def test_nobody_gets_more_than_its_memory_holds():
    run = Run(samples=300, epochs=1, scheme="lb-bsp", options={"emulate": parse_cluster(SMALL_MEMORY)})
    values = results(run_workers(training.train, 3, run))
    assert max(sizes[0] for sizes in values[0]["sizes"]) == 7
    assert all(sum(sizes) == 15 for sizes in values[0]["sizes"])


@pytest.mark.multiprocess
def test_sizes_beyond_memory_are_refused():
    run = Run(options={"emulate": parse_cluster(SMALL_MEMORY), "batch_sizes": [8, 4, 3]})
    for outcome in run_workers(training.train, 3, run):
        assert "worker 0 cannot take the batch size 8" in outcome.error


@pytest.mark.multiprocess
def test_batch_norm_never_sees_a_single_sample():
    # 61 samples in slices of 15: the last slice has one sample for three workers.
    run = Run(samples=61, epochs=3, scripted=5)
    values = results(run_workers(training.train_with_batch_norm, 3, run))
    assert min(min(value["computed"]) for value in values) == 2
    assert sum(value["counted"] for value in values) == 3 * 61


@pytest.mark.multiprocess
def test_a_foreign_hook_is_refused_and_the_argument_named():
    for outcome in run_workers(training.prepare_hooked, 2, Run()):
        assert outcome.error.startswith("ConfigError")
        assert "comm_hook=(state, hook)" in outcome.error


@pytest.mark.multiprocess
def test_several_backwards_in_an_iteration_are_measured_once():
    cluster = parse_cluster("""
        [devices.fast]
        per_sample = "4 ms"
        [devices.slow]
        per_sample = "12 ms"
        [[workers]]
        device = "fast"
        [[workers]]
        device = "slow"
    """)
    run = Run(samples=800, batch_size=20, epochs=1, scheme="lb-bsp", options={"emulate": cluster})
    values = results(run_workers(training.train_twice_backward, 2, run))
    assert abs(values[0]["sizes"][0] - 30) <= 2


@pytest.mark.multiprocess
def test_a_prepared_model_can_be_copied_and_pickled():
    assert results(run_workers(training.copy_prepared, 2, Run())) == [True, True]
