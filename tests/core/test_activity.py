import pytest

from evenstep.core.activity import Doing, Seen, behind


def seen(doing, iteration, seconds=10.0):
    return Seen(doing=doing, iteration=iteration, seconds=seconds)


WAITING = seen(Doing.WAITING, 58)


@pytest.mark.parametrize(
    ("third", "expected"),
    [
        (seen(Doing.PREPARING, -1), [2]),
        (seen(Doing.COMPUTING, 57), [2]),
        (seen(Doing.STEPPED, 57), [2]),
        (seen(Doing.LEFT, 57), [2]),
        (seen(Doing.CHECKPOINTING, 57), [2]),
        (seen(Doing.FETCHING, 58), [2]),
        (seen(Doing.COMPUTING, 58), [2]),
        # It missed a call that the others made.
        (seen(Doing.WAITING, 57), [2]),
        (seen(Doing.WAITING, 58), []),
    ],
)
def test_the_worker_that_has_come_least_far_is_the_one_that_the_others_wait_for(third, expected):
    assert behind({0: WAITING, 1: WAITING, 2: third}) == expected


def test_a_worker_that_computes_where_another_has_not_asked_for_data_is_not_named():
    # Its model may wait for the others in a collective of its own, as a sharded one does.
    assert behind({0: seen(Doing.COMPUTING, 58), 1: seen(Doing.STEPPED, 57), 2: WAITING}) == [1]


def test_a_worker_that_has_just_begun_is_not_named():
    assert behind({0: WAITING, 1: seen(Doing.FETCHING, 58, seconds=0.2)}, least_seconds=1.0) == []


@pytest.mark.parametrize(
    ("each", "text"),
    [
        (seen(Doing.PREPARING, -1), "has been in prepare for 10 s"),
        (seen(Doing.STEPPED, -1), "has been outside the loader for 10 s"),
        (seen(Doing.COMPUTING, 0), "has been outside the loader for 10 s, in iteration 0"),
        (seen(Doing.FETCHING, 3), "has been waiting for the data of iteration 3 for 10 s"),
        (seen(Doing.LEFT, 3), "has been outside the loop for 10 s, after iteration 3"),
        (seen(Doing.CHECKPOINTING, 3), "has been in a checkpoint for 10 s, after iteration 3"),
    ],
)
def test_what_a_worker_does_is_the_rest_of_a_sentence(each, text):
    assert str(each) == text
