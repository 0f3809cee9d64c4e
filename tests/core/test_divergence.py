"""When training is taken to have diverged: from how wrong the outputs are, and whether they are too large."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evenstep.core.divergence import Divergence

EXCESS = st.floats(-100, 100)


def told(pairs):
    """What was said, with the iteration (from 0) at which it was."""
    watch = Divergence()
    answers = [(number, watch.observe(number, *pair)) for number, pair in enumerate(pairs) if watch.due(number)]
    return [(number, since) for number, since in answers if since is not None]


def test_diverged_into_confident_nonsense():
    # Learns for 40 iterations, and is then as wrong as at first, on logits that are too large.
    assert told([(1.7, -0.3)] * 20 + [(0.9, -0.1)] * 20 + [(1.8, 1.5)] * 100) == [(99, 40)]


def test_diverged_into_dead_units_after_one_jump():
    assert told([(1.7, 0.05)] + [(1.7, 0.4)] * 19 + [(1.8, 0.01)] * 100) == [(79, 20)]


def test_it_is_said_once():
    assert len(told([(1.7, 0.0)] + [(1.7, 0.4)] * 10_000)) == 1


def test_what_goes_well_again_begins_anew():
    bad, good = [(1.8, 0.5)] * 40, [(1.0, 0.5)] * 20
    assert told([(1.8, 0.0)] + [(1.8, 0.5)] * 19 + bad + good + bad) == []


@pytest.mark.parametrize(
    "rest",
    [
        pytest.param((1.9, -0.01), id="logits still grow: a task that is learnt slowly"),
        pytest.param((1.5, 0.3), id="too large, but less wrong: a high rate that still learns"),
    ],
)
def test_healthy(rest):
    assert told([(1.9, 0.0)] + [(1.9, 0.3)] * 19 + [rest] * 5_000) == []


def test_large_logits_at_rest_while_the_rate_warms_up_are_healthy():
    assert told([(1.9, 0.7)] * 2_000 + [(1.9, 0.5)] * 2_000) == []


def test_what_has_little_to_learn_is_healthy_though_no_better_than_at_first():
    assert told([(1.9, 0.08)] * 20 + [(1.89, 0.03)] * 5_000) == []


def test_in_a_long_run_a_window_is_an_eighth_of_it():
    learnt, lost = [(1.8, -0.2)] * 20 + [(0.2, -0.1)] * 100_000, [(1.8, 2.0)] * 60_000
    ((at, since),) = told(learnt + lost)
    assert len(learnt) - 100_000 / 8 <= since <= len(learnt) + 100_000 / 8
    assert at - since <= 0.5 * since
    # Far fewer are not enough.
    assert told(learnt + lost[:1000] + learnt) == []


@given(st.lists(st.tuples(st.floats(0, 2), EXCESS), max_size=400), st.floats(1e-30, 1e30))
def test_the_unit_of_the_error_does_not_matter(pairs, unit):
    # In powers of two, which round nothing.
    unit = 2.0 ** round(max(-60, min(60, unit)))
    assert told([(error * unit, excess) for error, excess in pairs]) == told(pairs)


@given(st.floats(1e-3, 1e3), st.floats(0.002, 0.5), st.lists(EXCESS, min_size=1, max_size=200))
def test_an_error_that_falls_is_never_warned_of(first, falls, excesses):
    pairs = [(first * (1 - falls) ** number, excess) for number, excess in enumerate(excesses * 5)]
    assert told(pairs) == []


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(-100, 0)), max_size=400))
def test_logits_that_are_not_too_large_are_never_warned_of(pairs):
    assert told(pairs) == []
