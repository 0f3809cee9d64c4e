import json

import numpy as np
import pytest

from evenstep.core.load.levels import Levels
from evenstep.core.load.solver import Lines

EQUAL, UNEVEN = (32, 32), (52, 12)
UNKNOWN = Lines(per_sample=np.array([10**6, 10**6]), fixed=np.array([0, 0]), flat=np.array([0, 0]))


class Cluster:
    """Two workers that take a millisecond for each of `fixed` + size samples; their loads have this noise."""

    def __init__(self, noise=0.0, fixed=0, seed=0, reported=UNKNOWN):
        self.levels, self.window, self.reported = Levels(), [], reported
        self.noise, self.fixed, self.random = noise, fixed, np.random.default_rng(seed)

    def train(self, blocks, sizes, loads=(1.0, 1.0)):
        for _ in range(blocks):
            # What slows both workers says nothing.
            common = np.exp(self.random.normal(0.0, 0.3))
            each = np.exp(self.random.normal(0.0, self.noise, 2))
            microseconds = 1000 * (self.fixed + np.array(sizes)) * np.array(loads) * common * each
            self.window = [*self.window, np.array([sizes, np.round(microseconds).astype(np.int64)])][-64:]
            self.levels.observe(self.window, self.reported)
        return self

    def ratio(self, sizes):
        """How much longer worker 1 takes than worker 0."""
        first, second = self.levels.times.nanoseconds(np.array(sizes)).tolist()
        return second / first


def test_before_the_first_block_nothing_is_known():
    assert Levels().times is None


def test_what_slows_all_workers_is_no_load():
    assert Cluster().train(10, EQUAL).ratio(EQUAL) == pytest.approx(1.0, rel=0.01)


def test_a_change_of_load_counts_from_its_second_block_on():
    cluster = Cluster(noise=0.02).train(20, EQUAL)
    assert cluster.train(1, EQUAL, (1.0, 2.0)).ratio(EQUAL) == pytest.approx(1.0, rel=0.05)
    assert cluster.train(1, EQUAL, (1.0, 2.0)).ratio(EQUAL) == pytest.approx(2.0, rel=0.05)
    assert cluster.train(2, EQUAL).ratio(EQUAL) == pytest.approx(1.0, rel=0.05)


def test_the_level_is_the_mean_since_the_last_change():
    cluster = Cluster(noise=0.1).train(40, EQUAL).train(40, EQUAL, (1.0, 3.0))
    assert cluster.ratio(EQUAL) == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("fixed", [16, 128])
def test_a_fixed_part_is_found_where_sizes_change_and_loads_do_not(fixed):
    for seed in range(5):
        cluster = Cluster(noise=0.1, fixed=fixed, seed=seed).train(20, EQUAL).train(6, EQUAL, (1.0, 4.0))
        cluster.train(6, UNEVEN, (1.0, 4.0)).train(6, UNEVEN).train(6, EQUAL).train(6, UNEVEN)
        expected = (fixed + 12) / (fixed + 52)
        assert cluster.ratio(UNEVEN) == pytest.approx(expected, rel=0.2)
        # With the reported models the ratio at equal sizes would be that times 52 / 12.
        assert cluster.ratio(EQUAL) == pytest.approx(1.0, rel=0.35)


def test_no_fixed_part_is_found_where_there_is_none():
    for seed in range(5):
        cluster = Cluster(noise=0.1, seed=seed).train(20, EQUAL)
        for _ in range(3):
            cluster.train(6, UNEVEN).train(6, EQUAL)
        assert cluster.ratio(UNEVEN) == pytest.approx(12 / 52, rel=0.15)


def test_a_load_that_changes_with_the_sizes_says_nothing_about_the_fixed_part():
    for seed in range(5):
        cluster = Cluster(noise=0.1, seed=seed).train(20, EQUAL).train(4, UNEVEN, (1.0, 4.0))
        # Worker 1 takes as long as before with fewer samples, as it would if its time did not depend on them.
        assert cluster.ratio(EQUAL) == pytest.approx(4.0, rel=0.35)


def test_with_little_noise_the_workers_own_models_are_used():
    cluster = Cluster(noise=0.01, fixed=64).train(20, EQUAL).train(6, UNEVEN).train(6, EQUAL).train(6, UNEVEN)
    assert cluster.ratio((1, 1)) == pytest.approx((64 + 12) / 12 / ((64 + 52) / 52), rel=0.05)


def test_other_workers_start_from_nothing():
    cluster = Cluster(noise=0.1, fixed=64).train(8, EQUAL).train(4, UNEVEN).train(4, EQUAL)
    cluster.window = []
    cluster.train(1, EQUAL, (1.0, 2.0))
    assert cluster.ratio(EQUAL) == pytest.approx(2.0, rel=0.3)


def test_a_checkpoint_goes_on_bit_for_bit():
    one = Cluster(noise=0.1, fixed=64).train(8, EQUAL).train(3, UNEVEN)
    other = Cluster(noise=0.1, fixed=64).train(8, EQUAL).train(3, UNEVEN)
    other.levels = Levels()
    other.levels.load_state_dict(json.loads(json.dumps(one.levels.state_dict())))
    for cluster in (one, other):
        cluster.train(5, EQUAL, (1.0, 2.0)).train(5, UNEVEN)
    assert one.levels.state_dict() == other.levels.state_dict()


def test_extreme_times_stay_within_64_bits():
    levels, window = Levels(), []
    reported = Lines(per_sample=np.array([10**12, 1]), fixed=np.array([10**15, 0]), flat=np.array([0, 10**6]))
    with np.errstate(over="raise"):
        for row in ([1, 10**15], [10**15, 1]) * 4:
            window.append(np.array([[1000, 1000], row]))
            levels.observe(window, reported)
        window.append(np.array([[1, 1999], [1, 10**15]]))
        levels.observe(window, reported)
    assert (levels.times.nanoseconds(np.array([1000, 1000])) > 0).all()
