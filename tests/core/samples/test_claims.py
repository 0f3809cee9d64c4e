import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from evenstep.core.errors import ProtocolError
from evenstep.core.samples.claims import Claim, Claims


def test_claims_are_handed_out_in_order_and_end_with_the_epoch():
    claims = Claims(5)
    assert claims.take(0, 3) == Claim.of(0, ((0, 3),))
    assert claims.take(1, 3) == Claim.of(1, ((3, 5),))
    assert claims.take(0, 3) is None
    assert (claims.unclaimed, claims.finished, claims.over) == (0, 0, False)
    claims.finish(1, 1)
    claims.finish(0, 0)
    assert (claims.unclaimed, claims.finished, claims.over) == (0, 5, True)


def test_an_epoch_of_nothing_is_over():
    assert Claims(0).over
    assert Claims(0).take(0, 3) is None


def test_nothing_is_claimed_by_asking_for_nothing():
    assert Claims(5).take(0, 0) is None


def test_what_was_given_back_is_handed_out_before_anything_new_in_pieces_and_together():
    claims = Claims(20)
    for _ in range(3):
        claims.take(0, 4)
    claims.give_back(0, [0, 2])
    assert claims.unclaimed == 16
    assert claims.take(1, 3).ranges == ((0, 3),)
    mixed = claims.take(1, 8)
    assert mixed.ranges == ((3, 4), (8, 15))
    assert mixed.samples == 8
    assert mixed.positions == (3, 8, 9, 10, 11, 12, 13, 14)
    claims.give_back(1, [mixed.number])
    assert claims.take(0, 20).ranges == ((3, 4), (8, 20))


@pytest.mark.parametrize(("worker", "number"), [(0, 1), (1, 0), (2, 2)])
def test_a_claim_that_is_not_held_is_refused(worker, number):
    claims = Claims(5)
    claims.take(0, 2)
    claims.take(1, 2)
    with pytest.raises(ProtocolError, match=f"worker {worker} has finished the claim {number}, which it does not hold"):
        claims.finish(worker, number)
    with pytest.raises(ProtocolError, match="which it does not hold"):
        claims.give_back(worker, [number])


def test_a_claim_is_finished_once():
    claims = Claims(5)
    claims.take(0, 2)
    claims.finish(0, 0)
    with pytest.raises(ProtocolError):
        claims.finish(0, 0)
    with pytest.raises(ProtocolError):
        claims.give_back(0, [0])


class AnyOrder(RuleBasedStateMachine):
    """Against a list of who has each position: None, a claim's (worker, number), or done."""

    @initialize(length=st.integers(0, 30))
    def start(self, length):
        self.claims = Claims(length)
        self.owners = [None] * length
        self.open = {}

    @rule(worker=st.integers(0, 2), size=st.integers(0, 12))
    def take(self, worker, size):
        free = self.owners.count(None)
        claim = self.claims.take(worker, size)
        assert (claim is None) == (min(size, free) == 0)
        if claim is not None:
            assert claim.samples == len(claim.positions) == min(size, free)
            for position in claim.positions:
                assert self.owners[position] is None
                self.owners[position] = (worker, claim.number)
            assert (worker, claim.number) not in self.open
            self.open[worker, claim.number] = claim
        self.look()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), done=st.booleans())
    def close(self, data, done):
        name = data.draw(st.sampled_from(sorted(self.open)))
        claim = self.open.pop(name)
        if done:
            self.claims.finish(*name)
        else:
            self.claims.give_back(name[0], [name[1]])
        for position in claim.positions:
            self.owners[position] = "done" if done else None
        self.look()

    @rule()
    def start_from_a_snapshot(self):
        state = json.loads(json.dumps(self.claims.state_dict()))
        self.claims = Claims(7)
        self.claims.load_state_dict(state)
        self.owners = [each if each == "done" else None for each in self.owners]
        self.open = {}
        assert self.claims.state_dict() == state
        self.look()

    def look(self):
        assert self.claims.unclaimed == self.owners.count(None)
        assert self.claims.finished == self.owners.count("done")
        assert self.claims.over == all(each == "done" for each in self.owners)


def test_each_position_has_one_owner_in_any_order_of_events():
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=50, stateful_step_count=40))
