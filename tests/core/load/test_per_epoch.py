import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.cluster.slowness import MEASURED_CURVES, PointCurve
from evenstep.core.errors import ConfigError
from evenstep.core.load import PerEpoch
from evenstep.core.values import UNLIMITED, Problem, Reports


def ints(values):
    return np.array(values, dtype=np.int64)


def problem(batch, workers, epoch, *, minimum=1, maximum=UNLIMITED, multiple=1):
    return Problem(
        global_batch_size=batch,
        minimum=ints([minimum] * workers),
        maximum=ints([maximum] * workers),
        multiple=multiple,
        epoch=epoch,
    )


def report(samples, microseconds):
    nothing = ints([0] * len(samples))
    return Reports(
        samples=ints(samples),
        compute_microseconds=ints(microseconds),
        forecast=nothing,
        largest_size=nothing + UNLIMITED,
    )


def after(observations, batch, **limits):
    """The sizes of epoch 1 after these iterations, each (samples, microseconds), of epoch 0."""
    workers = len(observations[0][0])
    policy = PerEpoch().policy(workers)
    policy.allocate(problem(workers, workers, 0))
    for samples, microseconds in observations:
        policy.observe(report(samples, microseconds))
    return policy.allocate(problem(batch, workers, 1, **limits)).sizes.tolist()


def published_rounding(ideal, batch):
    """The published code's: one more for the largest remainders that are also at least one half."""
    sizes = np.floor(ideal)
    remainders = ideal - sizes
    largest = np.argsort(remainders)[-round(batch - sizes.sum()) :]
    sizes[[worker for worker in largest if remainders[worker] >= 0.5]] += 1
    return sizes.tolist()


def test_the_first_epoch_is_equal():
    policy = PerEpoch().policy(4)
    assert policy.allocate(problem(10, 4, 0)).sizes.tolist() == [3, 3, 2, 2]
    policy.observe(report([3, 3, 2, 2], [100, 200, 300, 400]))
    assert policy.allocate(problem(10, 4, 0)).sizes.tolist() == [3, 3, 2, 2]


def test_performance_is_share_over_time():
    assert after([([16] * 4, [4000, 4000, 2000, 1000])], 64) == [8, 8, 16, 32]
    assert after([([10, 30], [1000, 1000])], 40) == [10, 30]


def test_the_golden_case_of_the_paper():
    # Appendix A: B = 64, q = [13.7, 16.5, 19.6, 14.2].
    assert after([([137, 165, 196, 142], [1000] * 4)], 64) == [14, 16, 20, 14]


def test_no_sample_is_lost_where_the_published_rounding_loses_one():
    ideal = [13.4, 16.3, 20.2, 14.1]
    assert sum(published_rounding(np.array(ideal), 64)) == 63
    assert after([([134, 163, 202, 141], [1000] * 4)], 64) == [14, 16, 20, 14]


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**9)), min_size=1, max_size=12), st.integers(0, 10**5)
)
def test_the_sum_is_exact_and_every_size_within_one_of_its_ideal(rates, extra):
    batch = len(rates) + extra
    sizes = after([tuple(zip(*rates, strict=True))], batch, minimum=0)
    speeds = np.array([samples / microseconds for samples, microseconds in rates])
    assert sum(sizes) == batch
    assert (np.abs(sizes - batch * speeds / speeds.sum()) < 1.0 + 1e-6).all()


def test_the_iterations_of_an_epoch_add_up():
    # A short last slice and a report of the sizes before count for what they are.
    observations = [([30, 30], [300, 100]), ([30, 30], [300, 100]), ([2, 2], [20, 8])]
    assert after(observations, 80) == after([([62, 62], [620, 208])], 80)


def test_sizes_change_with_the_epoch_only():
    policy = PerEpoch().policy(2)
    policy.allocate(problem(60, 2, 0))
    policy.observe(report([30, 30], [300, 100]))
    assert policy.allocate(problem(60, 2, 1)).sizes.tolist() == [15, 45]
    for _ in range(3):
        policy.observe(report([15, 45], [600, 150]))
        assert policy.allocate(problem(60, 2, 1)).sizes.tolist() == [15, 45]
    # 15 / 600 against 45 / 150: one to twelve.
    assert policy.allocate(problem(60, 2, 2)).sizes.tolist() == [5, 55]


def test_a_worker_that_reported_nothing_keeps_its_performance():
    policy = PerEpoch().policy(2)
    policy.allocate(problem(60, 2, 0))
    policy.observe(report([30, 30], [300, 100]))
    policy.allocate(problem(60, 2, 1))
    assert policy.allocate(problem(60, 2, 2)).sizes.tolist() == [15, 45]
    policy.observe(report([0, 45], [0, 300]))
    # 0.1 as before, against 0.15.
    assert policy.allocate(problem(60, 2, 3)).sizes.tolist() == [24, 36]


def test_sizes_stay_equal_until_every_worker_is_known():
    policy = PerEpoch().policy(2)
    policy.allocate(problem(60, 2, 0))
    policy.observe(report([30, 0], [300, 0]))
    assert policy.allocate(problem(60, 2, 1)).sizes.tolist() == [30, 30]
    policy.observe(report([0, 30], [0, 100]))
    assert policy.allocate(problem(60, 2, 2)).sizes.tolist() == [15, 45]


def test_limits_and_multiples_hold():
    rates = [([10] * 3, [100, 1000, 10_000])]
    assert after(rates, 64) == [57, 6, 1]
    assert after(rates, 64, maximum=40) == [40, 22, 2]
    assert after(rates, 64, minimum=8) == [48, 8, 8]
    assert after(rates, 64, minimum=1, multiple=8) == [48, 8, 8]
    with pytest.raises(ConfigError, match="raise the maximum"):
        after(rates, 64, maximum=20)


def test_an_epochs_last_slice_and_a_new_limit_leave_nothing_behind():
    policy = PerEpoch().policy(2)
    policy.allocate(problem(60, 2, 0))
    policy.observe(report([30, 30], [300, 100]))
    assert policy.allocate(problem(60, 2, 1)).sizes.tolist() == [15, 45]
    assert policy.allocate(problem(7, 2, 1)).sizes.tolist() == [2, 5]
    assert policy.allocate(problem(60, 2, 1, maximum=40)).sizes.tolist() == [20, 40]
    assert policy.allocate(problem(60, 2, 1)).sizes.tolist() == [15, 45]


def test_a_run_resumed_after_any_iteration_decides_alike():
    generator = np.random.default_rng(0)
    policy = PerEpoch().policy(3)
    for iteration in range(40):
        asked = problem(90, 3, iteration // 7)
        sizes = policy.allocate(asked).sizes
        resumed = PerEpoch().policy(3)
        resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
        assert resumed.allocate(asked).sizes.tolist() == sizes.tolist()
        policy = resumed
        policy.observe(report(sizes, generator.integers(1000, 9000, 3)))
    assert len(set(sizes.tolist())) == 3


def test_another_number_of_workers_starts_equal_again():
    policy = PerEpoch().policy(2)
    policy.allocate(problem(90, 2, 0))
    policy.observe(report([45, 45], [100, 200]))
    assert policy.allocate(problem(90, 2, 1)).sizes.tolist() == [60, 30]
    assert policy.allocate(problem(90, 3, 1)).sizes.tolist() == [30, 30, 30]
    policy.observe(report([30] * 3, [100, 200, 200]))
    assert policy.allocate(problem(90, 3, 2)).sizes.tolist() == [45, 23, 22]


def test_speeds_of_every_magnitude_keep_their_ratio():
    for unit in (1, 10**3, 10**9):
        assert after([([64] * 3, [4 * unit, 2 * unit, unit])], 70) == [10, 20, 40]
    assert after([([1, 10**12], [10**12, 1])], 64) == [1, 63]


def test_four_measured_devices_are_balanced_in_five_epochs():
    devices = [PointCurve.measured(name) for name in MEASURED_CURVES]
    policy = PerEpoch().policy(4)
    ratios = []
    for epoch in range(12):
        sizes = policy.allocate(problem(512, 4, epoch)).sizes
        seconds = [device.seconds(int(size)) for device, size in zip(devices, sizes, strict=True)]
        ratios.append(max(seconds) / min(seconds))
        for _ in range(5):
            policy.observe(report(sizes, [round(1e6 * time) for time in seconds]))
    assert ratios[:6] == pytest.approx([5.56, 1.32, 1.14, 1.10, 1.05, 1.03], abs=0.015)
    assert sizes.tolist() == [168, 169, 158, 17]
    assert len(set(ratios[5:])) == 1


def test_time_in_proportion_to_size_is_met_in_one_epoch():
    policy = PerEpoch().policy(4)
    rate = ints([4000, 4000, 2000, 1000])
    for epoch, best in enumerate([[64] * 4, [32, 32, 64, 128], [32, 32, 64, 128]]):
        sizes = policy.allocate(problem(256, 4, epoch)).sizes
        assert sizes.tolist() == best
        policy.observe(report(sizes, rate * sizes))


def test_a_multiple_of_nothing_and_a_negative_minimum_are_refused():
    with pytest.raises(ConfigError, match="minimum=-1 and maximum=None leave no size: use 0 <= minimum <= maximum"):
        PerEpoch(minimum=-1)
    with pytest.raises(ConfigError, match="at least 1"):
        PerEpoch(multiple=0)
