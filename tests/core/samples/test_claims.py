import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from evenstep.core.samples.claims import Claim, Claims


def test_claims_are_handed_out_in_order_and_end_with_the_epoch():
    claims = Claims(5)
    first, second = claims.take(3), claims.take(3)
    assert first == Claim.of(0, ((0, 3),))
    assert second == Claim.of(1, ((3, 5),))
    assert claims.take(3) is None
    assert (claims.unclaimed, claims.finished, claims.over) == (0, 0, False)
    claims.finish(second)
    claims.finish(first)
    assert (claims.unclaimed, claims.finished, claims.over) == (0, 5, True)


def test_an_epoch_of_nothing_is_over():
    assert Claims(0).over
    assert Claims(0).take(3) is None


def test_nothing_is_claimed_by_asking_for_nothing():
    assert Claims(5).take(0) is None


def test_what_was_given_back_is_handed_out_before_anything_new_in_pieces_and_together():
    claims = Claims(20)
    first, _, third = [claims.take(4) for _ in range(3)]
    claims.give_back([first, third])
    assert claims.unclaimed == 16
    assert claims.take(3).ranges == ((0, 3),)
    mixed = claims.take(8)
    assert mixed.ranges == ((3, 4), (8, 15))
    assert mixed.samples == 8
    assert mixed.positions == (3, 8, 9, 10, 11, 12, 13, 14)
    claims.give_back([mixed])
    assert claims.take(20).ranges == ((3, 4), (8, 20))


class AnyOrder(RuleBasedStateMachine):
    """Against a list of what has each position: None, a claim's number, or done."""

    @initialize(length=st.integers(0, 30))
    def start(self, length):
        self.claims = Claims(length)
        self.owners = [None] * length
        self.open = {}

    @rule(size=st.integers(0, 12))
    def take(self, size):
        free = self.owners.count(None)
        claim = self.claims.take(size)
        assert (claim is None) == (min(size, free) == 0)
        if claim is not None:
            assert claim.samples == len(claim.positions) == min(size, free)
            for position in claim.positions:
                assert self.owners[position] is None
                self.owners[position] = claim.number
            assert claim.number not in self.open
            self.open[claim.number] = claim
        self.look()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), done=st.booleans())
    def close(self, data, done):
        claim = self.open.pop(data.draw(st.sampled_from(sorted(self.open))))
        if done:
            self.claims.finish(claim)
        else:
            self.claims.give_back([claim])
        for position in claim.positions:
            self.owners[position] = "done" if done else None
        self.look()

    @rule()
    def start_from_a_snapshot(self):
        state = json.loads(json.dumps(self.claims.state_dict(self.open.values())))
        self.claims = Claims(7)
        self.claims.load_state_dict(state)
        self.owners = [each if each == "done" else None for each in self.owners]
        self.open = {}
        assert self.claims.state_dict([]) == state
        self.look()

    def look(self):
        assert self.claims.unclaimed == self.owners.count(None)
        assert self.claims.finished == self.owners.count("done")
        assert self.claims.over == all(each == "done" for each in self.owners)


def test_each_position_has_one_owner_in_any_order_of_events():
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=50, stateful_step_count=40))
