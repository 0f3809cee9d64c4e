import json

import numpy as np

from evenstep.core.load import Predicted
from evenstep.core.load.block import BLOCK_MICROSECONDS, Block
from evenstep.core.load.estimate import Estimator
from evenstep.core.load.predict import PREDICTORS
from evenstep.core.values import UNLIMITED, Problem, Reports


def reports(microseconds, samples, per_sample=0):
    nothing = np.zeros(len(samples), dtype=np.int64)
    return Reports(
        samples=np.array(samples),
        compute_microseconds=np.array(microseconds),
        nanoseconds_per_sample=nothing + per_sample,
        fixed_nanoseconds=nothing,
        error_ppm=nothing,
        flat_size=nothing,
        largest_size=nothing + UNLIMITED,
    )


def ended(block, microseconds, samples=(8, 8)):
    return [row.tolist() for row in block.add(reports(microseconds, samples))]


def test_a_long_iteration_is_a_block_of_its_own():
    assert ended(Block(), [5000, BLOCK_MICROSECONDS]) == [[[8, 8], [5000, BLOCK_MICROSECONDS]]]


def test_short_iterations_are_added_up_until_the_slowest_worker_has_computed_long_enough():
    block = Block()
    assert ended(block, [2000, 15_000]) == ended(block, [4000, 15_000]) == []
    assert ended(block, [6000, 15_000]) == [[[8, 8], [4000, 15_000]]]
    assert ended(block, [6000, 15_000]) == []


def test_a_block_ends_before_other_sizes():
    block = Block()
    assert ended(block, [3000, 3000]) == []
    assert ended(block, [3000, 3000], (7, 9)) == []
    assert ended(block, [3000, 3000], (4, 12)) == [[[7, 8], [3000, 3000]]]
    assert ended(block, [3000] * 3, (4, 8, 4)) == [[[4, 12], [3000, 3000]]]


def test_iterations_in_which_a_worker_measured_nothing_do_not_count():
    block = Block()
    for _ in range(100):
        assert ended(block, [0, 30_000]) == ended(block, [30_000, 30_000], (16, 0)) == []


def test_a_checkpoint_of_half_a_block_goes_on_alike():
    block, other = Block(), Block()
    ended(block, [3000, 30_000])
    other.load_state_dict(json.loads(json.dumps(block.state_dict())))
    assert ended(block, [3000, 30_000]) == ended(other, [3000, 30_000]) == [[[8, 8], [3000, 30_000]]]


def test_an_estimator_learns_from_blocks_of_its_own_compute():
    blocks, whole = (Estimator(PREDICTORS["change"], warmup=0, block_seconds=each) for each in (0.04, 0.0))
    for _ in range(5):
        for seconds in (0.009, 0.011, 0.013, 0.015):
            blocks.observe(10, seconds)
        whole.observe(10, 0.012)
        assert blocks.estimate() == whole.estimate()
    # Another size, or the end of what belongs together, ends a block however short it is.
    blocks.observe(10, 0.012)
    blocks.observe(20, 0.024)
    blocks.end_block()
    for size in (10, 20):
        whole.observe(size, size * 0.0012)
    assert blocks.estimate() == whole.estimate()


def test_sizes_change_at_the_end_of_a_block_only():
    policy = Predicted().policy(2)
    ones = np.ones(2, dtype=np.int64)
    problem = Problem(global_batch_size=90, minimum=ones, maximum=ones * UNLIMITED)
    assert policy.allocate(problem).sizes.tolist() == [45, 45]
    decided = []
    for _ in range(6):
        policy.observe(reports([6000, 12_000], [45, 45])._replace(nanoseconds_per_sample=np.array([100, 200])))
        decided.append(policy.allocate(problem).sizes.tolist())
    assert decided == [[45, 45]] * 3 + [[60, 30]] * 3
