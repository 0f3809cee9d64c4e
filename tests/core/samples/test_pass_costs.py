"""Claims that are sized by cost, and slices that are shared out by it."""

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from evenstep.core.samples.claims import ANY, Claims
from evenstep.core.samples.pass_costs import MAX_RANGES, ClaimBounds, PassCosts

COSTS = [10, 30, 10, 10, 80, 10, 10, 10, 20, 10]


def of(costs, **options):
    return Claims(len(costs), PassCosts.of(np.array(costs), 10), **options)


def test_a_claim_ends_where_its_cost_is_closest_to_the_size():
    claims = of(COSTS)
    assert claims.unclaimed == 20
    assert claims.take(4).ranges == ((0, 2),)
    assert claims.unclaimed == 16
    # 20 or 100 of 60: the first is closer. A single sample that costs more is a claim of its own.
    assert claims.take(6).ranges == ((2, 4),)
    assert claims.take(6).ranges == ((4, 5),)
    assert claims.take(99).ranges == ((5, 10),)
    assert claims.take(1) is None
    assert (claims.unclaimed, claims.left, claims.finished) == (0, 0, 0)


def test_what_was_given_back_is_claimed_before_anything_new_and_counts_its_cost():
    claims = of(COSTS)
    first, _, third = [claims.take(size) for size in (4, 2, 8)]
    claims.give_back([first, third])
    assert claims.unclaimed == 18
    assert claims.take(1).ranges == ((0, 1),)
    assert claims.take(12).ranges == ((1, 2), (4, 6))
    assert claims.unclaimed == 5


def test_bounds_limit_a_claim():
    claims = of(COSTS)
    assert claims.take(8, ClaimBounds(most=3)).samples == 3
    assert claims.take(99, ClaimBounds(room=9)).ranges == ((3, 5),)
    assert claims.take(1, ClaimBounds(fewest=2, room=1)).ranges == ((5, 7),)
    # One sample would be left, on which no worker can compute alone.
    assert claims.take(3, ClaimBounds(fewest=2)).ranges == ((7, 10),)


def test_what_is_left_stays_where_a_claim_has_no_room_for_it():
    claims = of(COSTS[5:])
    assert claims.take(5, ClaimBounds(fewest=2, room=5)).ranges == ((0, 4),)
    assert claims.left == 1


def test_a_slice_is_shared_out_in_proportion_to_the_sizes():
    costs = [10, 10, 10, 10, 40, 10, 10, 10, 10, 40]
    claims = of(costs)
    slow, fast = claims.take_slice(np.array([2, 4]), [ANY, ANY], by_count=True)
    assert sorted(slow.positions + fast.positions) == list(range(6))
    assert sum(costs[each] for each in slow.positions) == 30
    by_cost = claims.take_slice(np.array([2, 4]), [ANY, ANY], by_count=False)
    assert sorted(by_cost[0].positions + by_cost[1].positions) == [6, 7, 8, 9]
    assert claims.unclaimed == 0
    claims.finish(slow)
    claims.give_back([fast])
    assert claims.left == fast.samples


def test_a_slice_with_fewer_positions_than_workers_leaves_some_without():
    claims = of([90, 10, 10])
    given = claims.take_slice(np.array([3, 3, 3]), [ANY] * 3, by_count=False)
    assert [each and each.samples for each in given] == [1, 1, 1]
    assert Claims.take_slice(of([90]), np.array([1, 1]), [ANY] * 2, by_count=False)[1] is None


def test_no_worker_of_a_slice_gets_more_than_it_holds_if_the_slice_allows_it():
    claims = of([10] * 6 + [20] * 3)
    small, large = ClaimBounds(room=3), ClaimBounds(room=9)
    of_small, of_large = claims.take_slice(np.array([5, 4]), [small, large], by_count=True)
    costs = claims.costs
    assert sum(costs.between(*piece) for piece in of_small.ranges) <= 30
    assert of_small.samples + of_large.samples == 9


def test_a_large_slice_is_claimed_in_few_ranges():
    costs = np.random.default_rng(0).integers(1, 100, 9000)
    claims = Claims(9000, PassCosts.of(costs, 50))
    given = claims.take_slice(np.array([1500, 1500, 6000]), [ANY] * 3, by_count=True)
    assert [len(each.ranges) for each in given] == [1, 1, 1]
    shares = [sum(claims.costs.between(*piece) for piece in each.ranges) / costs.sum() for each in given]
    np.testing.assert_allclose(shares, [1 / 6, 1 / 6, 4 / 6], rtol=0.002)
    small = Claims(9000, PassCosts.of(costs, 50))
    given = small.take_slice(np.array([150, 150]), [ANY] * 2, by_count=True)
    assert MAX_RANGES > max(len(each.ranges) for each in given) > 30
    small.give_back([given[0]])
    small.give_back([given[1]])
    assert small.state_dict([])["returned"] == [[0, 300]]


def test_the_largest_numbers_are_no_problem():
    costs = PassCosts.of(np.full(200, 2**31), 2**31)
    claims = Claims(200, costs)
    claim = claims.take(2**62, ClaimBounds(most=8))
    assert claim.ranges == ((0, 8),)
    given = claims.take_slice(np.full(64, 2), [ANY] * 64, by_count=False)
    assert [each.samples for each in given] == [2] * 64
    assert claims.left == claims.unclaimed == 64


def test_costs_come_again_after_a_restart():
    claims = of(COSTS)
    first, second = claims.take(4), claims.take(2)
    claims.finish(second)
    state = json.loads(json.dumps(claims.state_dict([first])))
    again = Claims(3)
    again.load_state_dict(state)
    assert again.costs.alike
    assert (again.left, again.finished) == (8, 2)
    again.weigh(PassCosts.of(np.array(COSTS), 10))
    assert again.unclaimed == 18
    assert again.take(4).ranges == ((0, 2),)


class AnyOrder(RuleBasedStateMachine):
    """Against a list of who has each position, as for claims by count."""

    @initialize(costs=st.lists(st.integers(1, 100), max_size=30), mean=st.integers(1, 40))
    def start(self, costs, mean):
        self.costs, self.mean = costs, mean
        self.claims = self.new()
        self.owners = [None] * len(costs)
        self.open = {}

    def new(self):
        return Claims(len(self.costs), PassCosts.of(np.array(self.costs, dtype=np.int64), self.mean))

    @rule(size=st.integers(0, 12), fewest=st.integers(1, 3), room=st.integers(1, 9))
    def take(self, size, fewest, room):
        free = self.owners.count(None)
        claim = self.claims.take(size, ClaimBounds(fewest=fewest, room=room))
        assert (claim is None) == (min(size, free) == 0)
        if claim is not None:
            own = [self.costs[each] for each in claim.positions]
            assert claim.samples >= min(fewest, free)
            if claim.samples > fewest:
                assert sum(own) <= room * self.mean
            elif fewest == 1:
                # Its size and one sample.
                assert sum(own) < size * self.mean + own[-1]
            self.hold(claim)
        self.look()

    @rule(sizes=st.lists(st.integers(0, 6), min_size=3, max_size=3), by_count=st.booleans(), fewest=st.integers(1, 2))
    def take_slice(self, sizes, by_count, fewest):
        free = self.owners.count(None)
        if not any(sizes) or not free:
            return
        bounds = [ClaimBounds(fewest=fewest)] * 3
        claims = self.claims.take_slice(np.array(sizes), bounds, by_count=by_count)
        count = sum(each.samples for each in claims if each)
        assert 0 < count <= free
        assert not by_count or count == min(free, sum(sizes))
        for worker, claim in enumerate(claims):
            if claim is not None:
                assert sizes[worker]
                self.hold(claim)
        self.look()

    def hold(self, claim):
        for position in claim.positions:
            assert self.owners[position] is None
            self.owners[position] = claim.number
        assert claim.number not in self.open
        self.open[claim.number] = claim

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
        before = self.claims.costs
        self.claims = Claims(7)
        self.claims.load_state_dict(state)
        self.claims.weigh(before)
        self.owners = [each if each == "done" else None for each in self.owners]
        self.open = {}
        self.look()

    def look(self):
        free = [cost for cost, owner in zip(self.costs, self.owners, strict=True) if owner is None]
        assert self.claims.left == len(free)
        assert self.claims.unclaimed == -(-sum(free) // self.mean)
        assert self.claims.finished == self.owners.count("done")


def test_each_position_has_one_owner_and_no_claim_costs_more_than_its_size_and_one_sample():
    run_state_machine_as_test(AnyOrder, settings=settings(max_examples=80, stateful_step_count=40))


@given(
    costs=st.lists(st.integers(1, 1000), min_size=1, max_size=50),
    mean=st.integers(1, 1000),
    size=st.integers(1, 20),
)
def test_an_epoch_is_claimed_once_from_its_beginning_to_its_end(costs, mean, size):
    claims, seen = Claims(len(costs), PassCosts.of(np.array(costs), mean)), []
    while (claim := claims.take(size)) is not None:
        seen += claim.positions
    assert seen == list(range(len(costs)))
