import pytest

from evenstep.core.coordinate import Agreed, Bundle, CombinedPush, Ring
from evenstep.core.errors import ProtocolError


def computing(*lines):
    """A bundle of workers that have a claim each."""
    bundle = Bundle()
    for line in lines:
        bundle.join(line)
        bundle.answer(line, 1, over=False)
    return bundle


def test_pushes_go_as_one_when_nobody_computes_any_more():
    bundle = computing(1, 2)
    bundle.push(2, samples=6, units=6)
    assert bundle.due() is None
    bundle.push(1, samples=2, units=2)
    assert bundle.due() == CombinedPush(1, ((1, 0.25), (2, 0.75)))
    assert bundle.due() is None


def test_an_empty_push_counts_nothing_and_weights_without_units_are_equal():
    bundle = computing(1, 2, 3)
    bundle.push(1, samples=0, units=5)
    bundle.push(2, samples=4, units=0)
    bundle.push(3, samples=1, units=0)
    assert bundle.due() == CombinedPush(1, ((1, 0.0), (2, 0.5), (3, 0.5)))


@pytest.mark.parametrize("leaves", [Bundle.leave, Bundle.ask])
def test_who_leaves_or_asks_for_something_else_is_not_waited_for(leaves):
    bundle = computing(1, 2)
    bundle.push(1, samples=4, units=4)
    leaves(bundle, 2)
    assert bundle.due() == CombinedPush(1, ((1, 1.0),))


def test_what_a_worker_that_dies_has_pushed_is_not_passed_on():
    bundle = computing(1, 2)
    bundle.push(1, samples=4, units=4)
    bundle.leave(1)
    bundle.push(2, samples=4, units=4)
    assert bundle.due() == CombinedPush(1, ((2, 1.0),))


def test_who_holds_a_further_claim_computes_once_it_is_answered():
    bundle = Bundle()
    bundle.join(1)
    bundle.answer(1, 2, over=False)
    bundle.push(1, samples=4, units=4)
    assert bundle.due() is not None
    bundle.answer(1, 0, over=False)
    bundle.push(1, samples=4, units=4)
    assert bundle.due() is not None
    bundle.answer(1, 0, over=True)
    with pytest.raises(ProtocolError, match="nothing to compute on"):
        bundle.push(1, samples=4, units=4)


def test_what_the_parent_refuses_goes_once_more_without_who_is_gone():
    bundle = computing(1, 2, 3)
    for line in (1, 2, 3):
        bundle.push(line, samples=4, units=line)
    assert bundle.due().number == 1
    bundle.leave(3)
    bundle.refuse(1)
    assert bundle.due() == CombinedPush(2, ((1, 1 / 3), (2, 2 / 3)))
    bundle.refuse(1)
    assert bundle.due() is None
    # Once it is answered there is nothing that could be refused.
    bundle.answer(1, 1, over=False)
    bundle.push(1, samples=4, units=1)
    bundle.refuse(2)
    assert bundle.due().weights == ((1, 1 / 3), (2, 2 / 3))


def offering(bundle, *lines):
    """What is agreed once these have offered, in this order."""
    for line in lines:
        assert bundle.agreed() is None
        bundle.offer(line, samples=4, units=line)
    return bundle.agreed()


def summed(bundle, *lines):
    """What goes to the parent once these have pushed what they agreed on."""
    for line in lines:
        assert bundle.due() is None
        bundle.push(line, samples=4, units=line)
    return bundle.due()


def test_those_who_offer_sum_up_once_nobody_computes_and_their_pushes_are_one():
    bundle = computing(1, 3)
    assert offering(bundle, 3, 1) == Agreed(((1, 0.25), (3, 0.75)), Ring(1, (1, 3)))
    assert bundle.agreed() is None
    assert summed(bundle, 3, 1) == CombinedPush(1, ((1, 0.25), (3, 0.75)), holder=1)
    # The next time in the same ring.
    for line in (1, 3):
        bundle.answer(line, 1, over=False)
    assert offering(bundle, 1, 3).ring == Ring(1, (1, 3))


def test_where_some_have_nothing_to_offer_each_pushes_its_own():
    bundle = computing(1, 2, 3)
    bundle.push(3, samples=0, units=0)
    assert offering(bundle, 1, 2) == Agreed(((1, 1 / 3), (2, 2 / 3)), None)
    assert summed(bundle, 1, 2) == CombinedPush(1, ((1, 1 / 3), (2, 2 / 3), (3, 0.0)))


def test_an_offer_alone_is_pushed_as_it_is():
    bundle = computing(1)
    assert offering(bundle, 1) == Agreed(((1, 1.0),), None)


def test_a_worker_that_comes_later_is_in_the_next_ring():
    bundle = computing(1, 2)
    bundle.join(3)
    assert offering(bundle, 1, 2).ring is None
    summed(bundle, 1, 2)
    for line in (1, 2, 3):
        bundle.answer(line, 1, over=False)
    assert offering(bundle, 1, 2, 3).ring == Ring(1, (1, 2, 3))


@pytest.mark.parametrize("pushed", [(), (1,), (1, 2)])
def test_a_worker_that_dies_while_they_sum_up_voids_the_iteration_for_all(pushed):
    bundle = computing(1, 2, 3)
    offering(bundle, 1, 2, 3)
    for line in pushed:
        bundle.push(line, samples=4, units=line)
    assert bundle.leave(3) == {1, 2}
    assert bundle.due() is None
    assert not bundle.leave(1)
    assert bundle.due() is None
    assert not bundle.leave(2)
    assert bundle.due() is None
    # They are back, over lines of their own.
    for line in (4, 5):
        bundle.join(line)
        bundle.answer(line, 1, over=False)
    assert offering(bundle, 4, 5).ring == Ring(2, (4, 5))


def test_a_worker_that_dies_before_they_have_agreed_voids_nothing():
    bundle = computing(1, 2, 3)
    bundle.offer(1, samples=4, units=4)
    assert not bundle.leave(1)
    assert offering(bundle, 2, 3).ring == Ring(1, (2, 3))


def test_of_a_sum_that_the_parent_refuses_all_begin_anew():
    bundle = computing(1, 2)
    offering(bundle, 1, 2)
    assert summed(bundle, 1, 2).number == 1
    assert bundle.refuse(1) == {1, 2}
    assert bundle.due() is None


def test_only_who_computes_can_offer():
    bundle = computing(1)
    bundle.offer(1, samples=4, units=4)
    with pytest.raises(ProtocolError, match="nothing to compute on"):
        bundle.offer(1, samples=4, units=4)


def test_the_first_holds_the_sum_also_where_its_own_part_counts_nothing():
    bundle = computing(1, 2)
    bundle.offer(1, samples=4, units=0)
    bundle.offer(2, samples=4, units=8)
    bundle.agreed()
    bundle.push(1, samples=4, units=0)
    bundle.push(2, samples=4, units=8)
    assert bundle.due() == CombinedPush(1, ((1, 0.0), (2, 1.0)), holder=1)


def test_who_comes_while_others_sum_up_pushes_its_own_and_the_sum_stays_one():
    bundle = computing(1, 2)
    offering(bundle, 1, 2)
    bundle.join(3)
    bundle.answer(3, 1, over=False)
    bundle.push(1, samples=4, units=1)
    assert bundle.due() is None
    bundle.push(2, samples=4, units=3)
    assert bundle.due() == CombinedPush(1, ((1, 0.25), (2, 0.75)), holder=1)
    assert bundle.due() is None
    bundle.offer(3, samples=4, units=4)
    assert bundle.agreed() == Agreed(((3, 1.0),), None)
    bundle.push(3, samples=4, units=4)
    assert bundle.due() == CombinedPush(2, ((3, 1.0),))


def test_who_comes_while_others_sum_up_does_not_hide_that_one_of_them_dies():
    bundle = computing(1, 2)
    offering(bundle, 1, 2)
    bundle.join(3)
    bundle.answer(3, 1, over=False)
    bundle.offer(3, samples=4, units=4)
    for line in (1, 2):
        assert bundle.agreed() is None
        bundle.push(line, samples=4, units=line)
    assert bundle.agreed() == Agreed(((3, 1.0),), None)
    assert bundle.leave(2) == {1}


def test_who_leaves_its_loop_in_a_sum_voids_the_iteration_for_the_others():
    bundle = computing(1, 2)
    offering(bundle, 1, 2)
    bundle.push(1, samples=4, units=1)
    assert bundle.ask(2) == {1}
    assert not bundle.leave(1)
    assert bundle.due() is None


def test_who_leaves_its_loop_with_an_offer_is_not_waited_for():
    bundle = computing(1, 2)
    bundle.offer(1, samples=4, units=4)
    assert not bundle.ask(1)
    assert offering(bundle, 2).ring is None
    assert summed(bundle, 2) == CombinedPush(1, ((2, 1.0),))
