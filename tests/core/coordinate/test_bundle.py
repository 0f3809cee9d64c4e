import pytest

from evenstep.core.coordinate import Bundle, CombinedPush
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
