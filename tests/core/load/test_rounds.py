"""Sizes of federated rounds, whose nodes are not the same in every round."""

import numpy as np
import pytest

from evenstep.core.errors import ConfigError
from evenstep.core.load.rounds import RoundSizes
from evenstep.schemes import parse_scheme

SPEEDS = {11: 1.0, 12: 1.0, 13: 2.0, 14: 4.0}


def balanced(load="lb-bsp"):
    return RoundSizes(parse_scheme(load).load)


def run(rounds, nodes, count, *, steps=5, fixed=0.0, noise=0.0, generator=None):
    """The sizes of so many rounds, in which these nodes report what their speeds say."""
    for _ in range(count):
        given = rounds.sizes(nodes, 32)
        for node, size in given.items():
            factor = 1.0 if generator is None else float(np.exp(generator.normal(scale=noise)))
            rounds.observe(node, size, steps * (fixed + size) / SPEEDS[node] * 1e-3 * factor)
    return rounds.sizes(nodes, 32)


def test_all_are_equal_before_anything_is_known():
    assert balanced().sizes([11, 12], 32) == {11: 32, 12: 32}


def test_after_one_round_sizes_are_in_proportion_to_speed_with_the_same_mean():
    assert run(balanced(), list(SPEEDS), 1) == {11: 16, 12: 16, 13: 32, 14: 64}


def test_a_fixed_part_of_the_time_is_learned():
    sizes = run(balanced(), list(SPEEDS), 12, fixed=8.0)
    seconds = [(8 + size) / SPEEDS[node] for node, size in sizes.items()]
    assert sum(sizes.values()) == 4 * 32
    assert max(seconds) / min(seconds) < 1.15


def test_noise_moves_sizes_little():
    generator = np.random.default_rng(0)
    for _ in range(5):
        sizes = run(balanced(), list(SPEEDS), 8, noise=0.05, generator=generator)
        for node, size in sizes.items():
            assert abs(size / (SPEEDS[node] * 16) - 1) < 0.2


def test_nodes_that_sit_out_are_remembered_and_new_ones_are_the_median():
    rounds = balanced()
    run(rounds, [11, 13, 14], 3)
    run(rounds, [11, 13], 3)
    sizes = rounds.sizes([11, 14, 99], 21)
    assert sizes == {11: 9, 14: 36, 99: 18}


@pytest.mark.parametrize("lie", [1e-12, 1e12])
def test_a_node_that_lies_is_bounded(lie):
    rounds = balanced()
    nodes = list(SPEEDS)
    run(rounds, nodes, 3)
    rounds.observe(14, 64, lie)
    rounds.observe(14, 64, lie)
    sizes = rounds.sizes(nodes, 32)
    assert sum(sizes.values()) == 4 * 32
    assert min(sizes.values()) >= 1
    assert rounds.sizes([11, 12, 13], 32)[11] == 24


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_what_is_no_time_is_refused(seconds):
    with pytest.raises(ValueError, match="finite"):
        balanced().observe(11, 32, seconds)


def test_limits_and_multiples_are_those_of_the_load():
    sizes = run(balanced("lb-bsp:minimum=24,maximum=40,multiple=8"), list(SPEEDS), 3)
    assert sum(sizes.values()) == 4 * 32
    assert set(sizes.values()) <= {24, 32, 40}
    assert sizes[14] == 40


def test_equal_sizes_stay_equal():
    assert set(run(balanced("bsp"), list(SPEEDS), 3).values()) == {32}


def test_no_node_no_size():
    assert balanced().sizes([], 32) == {}


def test_a_load_that_needs_all_workers_is_refused():
    with pytest.raises(ConfigError, match="use lb-bsp, or bsp"):
        balanced("dbs")
