"""What a node says of its seconds is bounded by what the server sees."""

import pytest

from evenstep.core.errors import ConfigError
from evenstep.core.rounds import RoundTimes
from evenstep.core.rounds.times import Believed, required_patience


def known(rests):
    times = RoundTimes()
    for node, rest in rests.items():
        for _ in range(3):
            times.observe(node, 1.0, 1.0 + rest)
    return times


def test_without_what_the_server_sees_a_node_is_believed():
    assert RoundTimes().believe(1, 2.0, None) == Believed(2.0)
    assert RoundTimes().believe(1, 1e-6, 5.0) == Believed(1e-6)


def test_a_node_computes_no_longer_than_it_was_away():
    believed = RoundTimes().believe(7, 1e9, 5.0)
    assert believed == Believed(5.0, "it was away for 5 s")


def test_a_node_that_says_too_little_counts_with_what_others_need_beside_compute():
    times = known({1: 0.1, 2: 0.2, 3: 0.3})
    believed = times.believe(9, 1e-6, 10.0)
    assert believed.seconds == pytest.approx(10.0 - 4 * 0.2)
    assert believed.reason == "it was away for 10 s, and the others need 0.2 s besides compute"
    for _ in range(50):
        times.observe(9, 1e-6, 10.0)
    assert times.believe(1, 1.0, 1.1) == Believed(1.0)


def test_small_differences_name_nobody():
    times = known({1: 0.1, 2: 0.2, 3: 0.3})
    assert times.believe(4, 1.0, 2.0) == Believed(pytest.approx(1.2), None)
    assert times.believe(4, 1.0, 0.9) == Believed(0.9, None)


def test_the_deadline_is_patience_times_the_longest_prediction_with_its_rest():
    times = known({1: 0.5, 2: 0.5, 3: 0.5})
    assert times.deadline({1: 4.0, 2: 2.0}, 2.0) == pytest.approx(9.0)
    assert times.deadline({99: 4.0}, 2.0) == pytest.approx(9.0)
    assert times.deadline({1: 4.0}, None) is None
    assert times.deadline({}, 2.0) is None
    assert RoundTimes().deadline({1: 4.0}, 2.0) is None


def test_a_node_cannot_make_rounds_wait_by_saying_little():
    times = known({1: 0.5, 2: 0.5, 3: 0.5})
    times.observe(9, 1e-6, 1000.0)
    assert times.deadline({9: 1.0}, 1.0) == pytest.approx(3.0)


@pytest.mark.parametrize("patience", [0.5, -1, float("nan"), float("inf"), "long"])
def test_a_patience_below_one_is_refused(patience):
    with pytest.raises(ConfigError, match="use a patience of at least 1"):
        required_patience(patience)
