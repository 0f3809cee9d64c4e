"""Drawn clusters: the same from the same seed, and other seeds of one change nothing but what is random in it."""

import advice
import pytest
from harness import drawn

from evenstep.sim import simulate


def test_a_seed_gives_the_same_clusters_and_another_gives_others():
    assert [drawn.draw(7, number) for number in range(5)] == [drawn.draw(7, number) for number in range(5)]
    assert drawn.draw(7, 0).cluster != drawn.draw(8, 0).cluster


def test_other_seeds_keep_devices_and_change_the_disturbances():
    one = next(each for each in (drawn.draw(0, number) for number in range(40)) if each.about["episodes"])
    first, second = one.with_seed(1), one.with_seed(2)
    assert [each.device for each in first.workers] == [each.device for each in second.workers]
    assert [each.disturbances for each in first.workers] != [each.disturbances for each in second.workers]


@pytest.mark.parametrize("number", range(6))
def test_each_can_be_simulated(number):
    one = drawn.draw(0, number)
    assert simulate(advice._scenario(one, "lb-bsp", 10, 1)).samples == 10 * one.global_batch_size
