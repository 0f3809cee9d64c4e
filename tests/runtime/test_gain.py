"""The gain that is claimed of a real run, whose iterations have a real fixed part, beside a run with equal sizes."""

import pytest
from support import fixed_costs
from support.processes import results, run_workers

from evenstep.report.overview import overview_of
from evenstep.report.recorded import read_run

pytestmark = [pytest.mark.multiprocess, pytest.mark.alone]

NOISE = 1.4
"""How far two measurements differ on a busy machine, which are taken in turns."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a run says of itself, and how many times as long one with equal sizes took, by a clock around both."""
    folder = tmp_path_factory.mktemp("runs")
    balanced, equal = results(run_workers(fixed_costs.train_by_turns, 2, str(folder), ["lb-bsp", "bsp"], 40, 10))[0]
    balanced_run, equal_run = (overview_of(str(number), read_run(folder / str(number))) for number in range(2))
    return balanced_run, equal_run, equal / balanced


def test_the_fixed_part_is_large_enough_to_mislead(run):
    done = run[0].run.iterations[1]
    decided = done.basis == 0
    per_sample = done.compute_seconds / done.samples
    assert per_sample[decided].mean() > 1.4 * per_sample[~decided].mean()


def test_the_claimed_gain_is_what_equal_sizes_really_take_longer(run):
    claimed, measured = run[0].gain.speed_up, run[2]
    assert claimed.low / NOISE <= measured <= claimed.high * NOISE
    # Two workers, one of them three times slower, cannot gain more than (1 + 3) / 2.
    assert claimed.low <= 2.0 * NOISE


def test_a_worker_is_as_slow_as_it_was_made(run):
    for each in run[:2]:
        assert each.verdict.worker == 1
        assert 3 / NOISE <= each.verdict.slowdown <= 3 * NOISE


def test_a_run_with_equal_sizes_gains_nothing_over_them(run):
    assert str(run[1].gain.speed_up) == "1.00"
