"""How much faster than equal sizes: what iterations of known times say, and what they do not."""

import numpy as np
import pytest

from evenstep.report.account.comparisons import Comparisons

PACES = np.ones(2)
UNEVEN = (24.0, 8.0)


def times(seconds, count, *, noise=None):
    factors = np.ones(count) if noise is None else noise.lognormal(0.0, 0.1, count)
    return [(seconds * float(factor), seconds * float(factor)) for factor in factors]


class Kept:
    """Feeds comparisons, and knows how long everything took."""

    def __init__(self):
        self.comparisons = Comparisons()
        self.seconds = 0.0

    def equal(self, taken):
        self.comparisons.add_equal(taken, PACES)
        self.seconds += sum(seconds for seconds, _ in taken)

    def decided(self, taken, sizes=UNEVEN):
        self.comparisons.add_decided(sizes, taken)
        self.seconds += sum(seconds for seconds, _ in taken)

    def speed_up(self):
        return self.comparisons.speed_up(self.seconds)


def test_the_gain_of_a_whole_run_counts_its_equal_iterations_too():
    run = Kept()
    run.equal(times(2.0, 4))
    run.decided(times(1.0, 96))
    assert run.speed_up().estimate == pytest.approx(200 / 104)


def test_a_drift_of_the_machine_s_speed_is_no_gain():
    run = Kept()
    for load in np.linspace(1.0, 3.0, 51):
        run.equal(times(1.0 * load, 3))
        for step in np.linspace(0.0, 0.04, 50):
            run.decided(times(load + step, 4))
    interval = run.speed_up()
    assert 0.99 < interval.low < interval.high < 1.01


def test_a_single_slow_iteration_is_no_gain():
    run = Kept()
    run.equal([*times(1.0, 3), (50.0, 50.0)])
    run.decided(times(1.0, 200))
    assert run.speed_up().estimate == pytest.approx(1.0)


def test_sizes_further_than_a_factor_of_two_from_those_compared_gain_nothing():
    run = Kept()
    run.equal(times(2.0, 4))
    run.decided(times(1.0, 100))
    before = run.speed_up().estimate * run.seconds
    run.decided(times(1.0, 20), sizes=(29.0, 3.0))
    assert run.speed_up().estimate * run.seconds == pytest.approx(before + 20)
    # And more of them leave too little to say anything of the run.
    run.decided(times(1.0, 20), sizes=(29.0, 3.0))
    assert run.speed_up() is None


def test_sizes_that_are_settled_soon_after_the_comparison_are_compared_by_themselves():
    run = Kept()
    run.equal(times(2.0, 4))
    run.decided(times(1.6, 3))
    run.decided(times(1.0, 100), sizes=(29.0, 3.0))
    assert run.speed_up().estimate == pytest.approx((4 * 2 + 103 * 2) / (8 + 4.8 + 100))


def test_sizes_that_settle_late_are_compared_with_the_next_equal_iterations():
    run = Kept()
    run.equal(times(2.0, 4))
    run.decided(times(1.6, 30))
    run.decided(times(1.0, 300), sizes=(29.0, 3.0))
    assert run.speed_up() is None
    run.equal(times(2.0, 3))
    run.decided(times(1.0, 1), sizes=(29.0, 3.0))
    assert run.speed_up().estimate == pytest.approx(338 * 2 / (7 * 2 + 30 * 1.6 + 301))


def test_short_last_slices_gain_what_whole_ones_do():
    run = Kept()
    run.equal(times(2.0, 4))
    run.decided(times(1.0, 95))
    run.comparisons.add_short((18.0, 6.0), [0.75])
    run.seconds += 0.75
    assert run.speed_up().estimate == pytest.approx((99 + 0.75) * 2 / (4 * 2 + 95.75))


def test_too_few_iterations_say_nothing():
    few = Kept()
    few.equal(times(2.0, 3))
    few.decided(times(1.0, 100))
    assert few.speed_up() is None
    none = Kept()
    none.decided(times(1.0, 100))
    assert none.speed_up() is None
    unlike = Kept()
    unlike.equal(times(2.0, 4))
    unlike.decided(times(1.0, 30))
    unlike.decided(times(1.0, 100), sizes=(29.0, 3.0))
    assert unlike.speed_up() is None


@pytest.mark.parametrize("blocks", [1, 5])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(blocks):
    held = 0
    for seed in range(100):
        noise = np.random.default_rng(seed)
        run = Kept()
        for _ in range(blocks):
            run.equal(times(1.5, 5, noise=noise))
            run.decided(times(1.0, 60, noise=noise))
        truth = 65 * 1.5 / (5 * 1.5 + 60)
        interval = run.speed_up()
        held += interval.low <= truth <= interval.high
    assert held >= 80


def test_a_machine_that_is_disturbed_for_a_while_now_and_then_makes_the_interval_wide():
    held = 0
    for seed in range(50):
        noise = np.random.default_rng(seed)
        # Bursts of 5 iterations that take three times as long, in one of four.
        bursts = np.repeat(noise.choice([1.0, 1.0, 1.0, 3.0], 40), 5).tolist()
        run = Kept()
        for equal, count in ((True, 4), (False, 60), (True, 3), (False, 133)):
            taken = [(each, each) for each in bursts[:count]]
            del bursts[:count]
            run.equal(taken) if equal else run.decided(taken)
        interval = run.speed_up()
        held += interval.low <= 1.0 <= interval.high
    assert held >= 45


def test_memory_does_not_grow_with_the_run():
    run = Kept()
    for _ in range(1000):
        run.equal(times(2.0, 3))
        run.decided(times(1.0, 400))
    assert len(run.comparisons._blocks) <= 64
    assert run.comparisons.references == 3000
    assert run.speed_up().estimate == pytest.approx(403 * 2 / (3 * 2 + 400))
