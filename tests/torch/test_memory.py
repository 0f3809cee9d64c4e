"""Memory that is learnt: sizes stay below what fits, and a batch that did not fit is remembered."""

import pytest
from support import training
from support.processes import results, run_workers
from support.told_speeds import told
from support.training import Run

from evenstep.cluster import parse_cluster

# Worker 0 is fast enough for 24 of 36 samples, and holds 19.
MEMORY = """
[devices.fast]
per_sample = "3 ms"
memory = "2 GB"
memory_fixed = "100 MB"
memory_per_sample = "100 MB"
[devices.slow]
per_sample = "12 ms"
[[workers]]
device = "fast"
[[workers]]
device = "slow"
count = 2
"""
KNOWN = """
[devices.small]
per_sample = "2 ms"
largest_batch = 19
[[workers]]
device = "small"
count = 3
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("scheme", ["lb-bsp", "lb-bsp:tuner=pairwise", "dbs", "local-sgd:period=2,load=lb-bsp"])
def test_a_size_that_does_not_fit_is_never_tried(scheme):
    run = Run(samples=360, batch_size=12, epochs=5, scheme=scheme, options={"emulate": parse_cluster(MEMORY)})
    values = results(run_workers(training.train, 3, run))
    largest = max(sizes[0] for sizes in values[0]["sizes"])
    assert 16 <= largest <= 19
    assert all(sum(sizes) == 36 for sizes in values[0]["sizes"])


@pytest.mark.alone
@pytest.mark.multiprocess
def test_micro_batches_need_no_more_memory_than_one():
    run = Run(
        scheme="lb-bsp:micro_batch=2",
        samples=1080,
        batch_size=12,
        epochs=1,
        options={"emulate": parse_cluster(MEMORY)},
    )
    values = results(run_workers(training.train_in_micro_batches, 3, run, "zero first"))
    assert values[0]["batches"] > 1.2 * values[1]["batches"]
    assert values[0]["largest"] == 2


@pytest.mark.multiprocess
def test_a_micro_batch_that_does_not_fit_is_refused():
    run = Run(scheme="bsp:micro_batch=20", batch_size=20, options={"emulate": parse_cluster(KNOWN)})
    for outcome in run_workers(training.train, 3, run):
        assert "micro-batches of 20 samples do not fit" in outcome.error


@pytest.mark.multiprocess
@pytest.mark.parametrize("scheme", ["lb-bsp", "dbs"])
def test_a_resumed_run_remembers_what_fits(scheme):
    run = Run(samples=360, batch_size=12, epochs=5, scheme=scheme, options={"emulate": parse_cluster(MEMORY)})
    results(run_workers(training.train_and_resume, 3, run, 45))


@pytest.mark.multiprocess
def test_a_first_iteration_that_is_short_limits_nobody():
    run = Run(samples=10, batch_size=12, epochs=4, scheme="lb-bsp", options={"emulate": parse_cluster(MEMORY)})
    values = results(run_workers(training.train, 3, run))
    assert values[0]["iterations"] == 4


@pytest.mark.multiprocess
def test_a_global_batch_beyond_what_is_known_to_fit_is_tried_with_one_warning():
    small = parse_cluster(MEMORY.partition("[[workers]]")[0] + '[[workers]]\ndevice = "fast"\ncount = 3')
    run = Run(samples=6, batch_size=12, epochs=3, scheme="lb-bsp", options={"emulate": small})
    values = results(run_workers(training.train_and_warn, 3, run))
    beyond = "known to hold 12 samples together, fewer than the global batch of 36"
    assert [sum(beyond in text for text in value["warnings"]) for value in values] == [1, 0, 0]


@pytest.mark.multiprocess
def test_looking_at_the_sizes_of_a_resumed_epoch_changes_nothing():
    run = Run(samples=240, batch_size=8, epochs=3, scheme=told("dbs", [1, 1, 3]))
    values = results(run_workers(training.look_at_sizes_after_resuming, 3, run, 25))
    assert values[0]["sizes"][2] < 6
