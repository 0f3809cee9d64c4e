"""What a node says of its seconds is bounded by what the server sees."""

import pytest

from evenstep.core.errors import ConfigError
from evenstep.core.rounds import RoundTimes
from evenstep.core.rounds.times import required_patience


def known(rests):
    times = RoundTimes()
    for _ in range(3):
        times.observe({node: (1.0, 1.0 + rest) for node, rest in rests.items()})
    return times


def test_without_what_the_server_sees_a_node_is_believed():
    assert RoundTimes().bounded(2.0, None) == 2.0
    assert RoundTimes().bounded(1e-6, 5.0) == 1e-6


def test_a_node_computes_no_longer_than_it_was_away():
    assert RoundTimes().bounded(1e9, 5.0) == 5.0


def test_a_node_that_says_too_little_counts_with_what_others_need_beside_compute():
    times = known({1: 0.1, 2: 0.2, 3: 0.3})
    assert times.bounded(1e-6, 10.0) == pytest.approx(10.0 - 4 * 0.2)
    for _ in range(50):
        times.observe({9: (1e-6, 10.0)})
    assert times.bounded(1.0, 1.1) == 1.0


def test_the_deadline_is_patience_times_the_longest_prediction_with_its_rest():
    times = known({1: 0.5, 2: 0.5, 3: 0.5})
    assert times.deadline({1: 4.0, 2: 2.0}, 2.0) == pytest.approx(9.0)
    assert times.deadline({99: 4.0}, 2.0) == pytest.approx(9.0)
    assert times.deadline({1: 4.0}, None) is None
    assert times.deadline({}, 2.0) is None
    assert RoundTimes().deadline({1: 4.0}, 2.0) is None


def test_a_node_cannot_make_rounds_wait_by_saying_little():
    times = known({1: 0.5, 2: 0.5, 3: 0.5})
    times.observe({9: (1e-6, 1000.0)})
    assert times.deadline({9: 1.0}, 1.0) == pytest.approx(3.0)


@pytest.mark.parametrize("patience", [0.5, -1, float("nan"), float("inf"), "long"])
def test_a_patience_below_one_is_refused(patience):
    with pytest.raises(ConfigError, match="use a patience of at least 1"):
        required_patience(patience)
