"""How many groups are worth it, and why."""

import pytest

from evenstep.core.groups import BySpeed, Progressive
from evenstep.core.groups.grouping import behind

ONE = (tuple(range(8)),)
APART = ((0, 1, 2, 3, 4, 5, 6), (7,))
BOTH = ((0, 1, 2, 3, 4, 5), (6, 7))


def slow(*others):
    """Seconds of eight workers, of whom the last ones take these."""
    return [1.0] * (8 - len(others)) + list(others)


@pytest.mark.parametrize(
    ("groups", "seconds", "then", "reason"),
    [
        (ONE, slow(4.0), APART, "worker 7 takes 4.00 times as long as worker 0: 2 groups do 3.62 times as much"),
        (ONE, slow(1.1), None, None),  # 7/8 of a tenth more is not worth it.
        (APART, slow(1.1), None, None),  # Nor is it worth to give it up again.
        (APART, slow(1.0), ONE, "one group does 1.00 times as much"),
        (APART, slow(3.0, 3.0), BOTH, "worker 6 takes 3.00 times as long as worker 0: 2 groups do"),
        ((*BOTH[:1], (6,), (7,)), slow(2.0, 2.0), BOTH, "2 groups do 1.00 times as much"),
        (APART, slow(40.0), ONE, "a group misses 35.0 global batches in an iteration, more than 10"),
    ],
)  # fmt: skip
def test_groups_follow_the_stragglers_for_a_reason(groups, seconds, then, reason):
    reformed = Progressive().reform(groups, seconds)
    if then is None:
        assert reformed is None
    else:
        assert reformed.groups == then
        assert reformed.reason.startswith(reason)


@pytest.mark.parametrize("staleness", [1.0, 3.4, 3.6, 20.0])
def test_no_group_is_formed_that_would_fall_further_behind_than_it_may(staleness):
    reformed = Progressive(behind=staleness).reform(ONE, slow(4.0))
    assert (reformed is not None) == (staleness > 3.5 == behind(APART, slow(4.0)))


def test_groups_of_similar_speed_say_what_they_gain():
    reformed = BySpeed(2).reform(((0, 1), (2, 3)), [1.0, 3.0, 1.0, 3.0])
    assert reformed == (((0, 2), (1, 3)), "of similar speed 2 groups do 2.00 times as much")
