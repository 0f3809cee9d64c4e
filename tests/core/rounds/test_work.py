"""Work of federated rounds, whose nodes are not the same in every round."""

import numpy as np
import pytest

from evenstep.core.errors import ConfigError
from evenstep.core.rounds import RoundWork, Work
from evenstep.schemes import parse_scheme

SPEEDS = {11: 1.0, 12: 1.0, 13: 2.0, 14: 4.0}


def balanced(load="lb-bsp", mode="batch"):
    return RoundWork(parse_scheme(load).load, mode)


def sizes_of(rounds, nodes, mean=32):
    return {node: work.batch_size for node, work in rounds.plan(nodes, mean).items()}


def run(rounds, nodes, count, *, steps=5, fixed=0.0, noise=0.0, generator=None):
    """The sizes of so many rounds, in which these nodes report what their speeds say."""
    for _ in range(count):
        given = sizes_of(rounds, nodes)
        for node, size in given.items():
            factor = 1.0 if generator is None else float(np.exp(generator.normal(scale=noise)))
            rounds.observe(node, Work(size, steps), steps * (fixed + size) / SPEEDS[node] * 1e-3 * factor)
    return sizes_of(rounds, nodes)


def test_all_are_equal_before_anything_is_known():
    assert sizes_of(balanced(), [11, 12]) == {11: 32, 12: 32}


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
    sizes = sizes_of(rounds, [11, 14, 99], 21)
    assert sizes == {11: 9, 14: 36, 99: 18}


@pytest.mark.parametrize("lie", [1e-12, 1e12])
def test_a_node_that_lies_is_bounded(lie):
    rounds = balanced()
    nodes = list(SPEEDS)
    run(rounds, nodes, 3)
    rounds.observe(14, Work(64, 5), lie)
    rounds.observe(14, Work(64, 5), lie)
    sizes = sizes_of(rounds, nodes)
    assert sum(sizes.values()) == 4 * 32
    assert min(sizes.values()) >= 1
    assert sizes_of(rounds, [11, 12, 13])[11] == 24


def test_limits_and_multiples_are_those_of_the_load():
    sizes = run(balanced("lb-bsp:minimum=24,maximum=40,multiple=8"), list(SPEEDS), 3)
    assert sum(sizes.values()) == 4 * 32
    assert set(sizes.values()) <= {24, 32, 40}
    assert sizes[14] == 40


def test_equal_sizes_stay_equal():
    assert set(run(balanced("bsp"), list(SPEEDS), 3).values()) == {32}


def test_no_node_no_size():
    assert sizes_of(balanced(), []) == {}


def test_a_load_that_needs_all_workers_is_refused():
    with pytest.raises(ConfigError, match="use lb-bsp, or bsp"):
        balanced("dbs")


def test_adaptive_tau_shares_out_the_steps():
    rounds = balanced(mode="steps")
    for _ in range(2):
        for node, work in rounds.plan(list(SPEEDS), 32, 10).items():
            assert work.batch_size == 32
            rounds.observe(node, work, work.samples / SPEEDS[node] * 1e-3)
    plan = rounds.plan(list(SPEEDS), 32, 10)
    assert {node: work.steps for node, work in plan.items()} == {11: 5, 12: 5, 13: 10, 14: 20}
    assert {work.rate for work in plan.values()} == {1.0}


def test_the_rate_may_follow_the_batch():
    rounds = balanced(mode="batch-and-lr")
    for node, work in rounds.plan(list(SPEEDS), 32, 10).items():
        rounds.observe(node, work, work.samples / SPEEDS[node] * 1e-3)
    plan = rounds.plan(list(SPEEDS), 32, 10)
    assert plan == {11: Work(16, 10, 0.5), 12: Work(16, 10, 0.5), 13: Work(32, 10, 1.0), 14: Work(64, 10, 2.0)}


def test_a_round_is_predicted_with_its_steps_and_a_new_node_as_the_median():
    rounds = balanced()
    assert rounds.seconds({11: Work(8, 2)}) == {}
    for node in (11, 13, 14):
        rounds.observe(node, Work(8, 2), 16 / SPEEDS[node])
    predicted = rounds.seconds({11: Work(4, 3), 14: Work(4, 3), 99: Work(4, 3)})
    assert predicted == pytest.approx({11: 12.0, 14: 3.0, 99: 6.0}, rel=1e-6)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="use one of batch, steps, batch-and-lr"):
        balanced(mode="tau")


def loops(rounds, seconds, count, flat, noise=0.0):
    """The sizes of each round, where the times of the `flat` nodes are the same at any size."""
    generator, found = np.random.default_rng(0), []
    for _ in range(count):
        found.append(sizes_of(rounds, list(seconds)))
        for node, size in found[-1].items():
            factor = (1.0 if node in flat else size / 32) * np.exp(noise * generator.normal())
            rounds.observe(node, Work(size, 5), seconds[node] * factor)
    return found


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_nodes_whose_time_does_not_follow_their_size_get_equal_sizes(noise):
    """As in an epoch over private data of these sizes, by nodes of the same speed."""
    rounds, seconds = balanced(), {11: 4.97, 12: 1.32, 13: 5.11, 14: 2.23}
    sizes = loops(rounds, seconds, 20, set(seconds), noise)
    assert all(each == dict.fromkeys(seconds, 32) for each in sizes[5:])
    assert rounds.flat == set(seconds)


def test_a_node_whose_time_does_not_follow_its_size_gets_the_mean_and_the_others_share_the_rest():
    rounds, seconds = balanced(), {11: 4.0, 12: 1.0, 13: 2.0, 14: 4.0}
    sizes = loops(rounds, seconds, 20, {11})[-1]
    assert rounds.flat == {11}
    assert sizes[11] == 32
    assert [sizes[node] for node in (12, 13, 14)] == pytest.approx([55, 27, 14], abs=2)


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_times_that_follow_sizes_are_never_taken_for_others(noise):
    """Nodes are four times slower for a while, so sizes change often."""
    rounds, generator = balanced(), np.random.default_rng(1)
    for _ in range(60):
        for node, size in sizes_of(rounds, list(SPEEDS)).items():
            slow = 4.0 if generator.random() < 0.2 else 1.0
            rounds.observe(node, Work(size, 5), size / SPEEDS[node] * slow * np.exp(noise * generator.normal()))
        assert not rounds.flat


@pytest.mark.parametrize("nodes", [3, 4])
def test_a_mean_that_is_no_multiple_is_refused_for_any_number_of_nodes(nodes):
    """Four nodes could have such sizes, and the three that are left when one vanishes could not."""
    with pytest.raises(ConfigError, match="use a mean that is a multiple too"):
        balanced("lb-bsp:multiple=8").plan(list(range(nodes)), 28)
