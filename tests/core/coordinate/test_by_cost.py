"""Samples that differ in cost: a claim is the next positions that cost about what its size does."""

import numpy as np

from evenstep.core.groups import ByRank
from evenstep.core.load import Experts
from evenstep.core.sync import Barrier, Bounded, Grouped, Unbounded
from evenstep.core.values import UNLIMITED

# In tenths of an average sample; a worker's size is 4, so a claim costs about 40.
UNEQUAL = [10, 30, 10, 10, 80, 10, 10, 10, 20, 10, 40, 5, 5, 5, 5, 20]


def positions(run, worker):
    return [position for claim in run.held[worker] for position in claim.positions]


def cost(positions, costs=UNEQUAL):
    return sum(costs[each] for each in positions)


def test_a_claim_costs_what_its_size_does_and_the_end_comes_for_all_together(Run):
    run = Run(Unbounded(), costs=UNEQUAL)
    assert run.begin(0, 1) == ["0: 0-2", "1: 2-4"]  # 10 + 10 is as close to 40 as 100 would not be
    assert run.push(1) == ["commit 1", "1: 4-5"]
    assert run.push(1) == ["commit 1", "1: 5-8"]
    assert run.push(0) == ["commit 0", "0: 8-10"]
    # 8 average samples are left, as many as a global batch; then claims shrink with what is left.
    assert run.push(0) == ["commit 0", "0: 10-11"]
    assert run.push(1) == ["commit 1", "1: 11-15"]
    assert run.push(1) == ["commit 1", "1: 15-16"]
    assert run.push(1) == ["commit 1", "1: nothing"]
    assert run.rest(1) == []
    assert run.push(0) == ["commit 0", "0: over", "1: over"]
    assert sorted(run.positions) == list(range(16))
    # A commit stands for its samples, whatever they cost.
    assert [update.share for update in run.updates[:3]] == [2 / 8, 1 / 8, 2 / 8]


def test_claims_ahead_are_sized_by_cost(Run):
    run = Run(Unbounded(), costs=UNEQUAL)
    # Alone, it has the whole global batch.
    assert run.begin(0, ahead=1) == ["0: 0-4 4-5"]
    assert run.more(0, ahead=2) == ["0 also: 5-10"]


def test_what_a_dead_worker_had_goes_to_the_others_by_cost(Run):
    run = Run(Bounded(bound=9), workers=3, batch=12, costs=UNEQUAL)
    assert run.begin(0, 1, 2) == ["0: 0-2", "1: 2-4", "2: 4-5"]
    assert run.leave(1) == []
    assert run.leave(0) == []
    assert run.push(2) == ["commit 2", "2: 0-4 5-10"]


def test_no_claim_costs_more_than_its_worker_holds(Run):
    run = Run(Unbounded(), costs=UNEQUAL, batch=16)
    assert run.begin(0, 1) == ["0: 0-4", "1: 4-5"]
    holds_three = (1, 1, 0, 3)
    assert run.push(1, row=holds_three) == ["commit 1", "1: 5-8"]
    assert cost(positions(run, 1)) <= 30


def test_a_slice_of_a_barrier_has_the_samples_of_the_epoch_and_equal_costs(Run):
    run = Run(Barrier(), costs=UNEQUAL)
    run.begin(0, 1)
    for start in (0, 8):
        both = [positions(run, worker) for worker in (0, 1)]
        assert sorted(both[0] + both[1]) == list(range(start, start + 8))
        costs = sorted(map(cost, both))
        # One sample alone costs 80 of 170.
        assert costs == ([80, 90] if not start else [55, 55])
        run.push(0, 1)
    assert run.updates[0].share == 1.0


def test_a_group_takes_the_next_samples_of_its_cost_and_shares_them_out(Run):
    costs = [10, 20] * 16
    run = Run(Grouped(grouping=ByRank(2), across=Unbounded()), workers=4, batch=24, costs=costs)
    run.begin(0, 1, 2, 3)
    groups = [positions(run, 0) + positions(run, 1), positions(run, 2) + positions(run, 3)]
    assert [cost(group, costs) for group in groups] == [120, 120]
    assert sorted(groups[0] + groups[1]) == list(range(16))
    for worker in range(4):
        assert cost(positions(run, worker), costs) == 60


def test_sizes_follow_speed_in_average_samples(Run):
    costs = np.random.default_rng(0).integers(1, 40, 400).tolist()
    run = Run(Unbounded(), costs=costs, batch=32, load=Experts(predictor="last", change_cost=0.0, warmup=0))
    run.begin(0, 1)
    for _ in range(3):
        run.push(0, row=(16, 48000, 0, UNLIMITED))
        run.push(1, row=(16, 16000, 0, UNLIMITED))
    assert abs(cost(positions(run, 0), costs) - 80) <= 20
    assert abs(cost(positions(run, 1), costs) - 240) <= 20


def test_after_a_restart_the_first_worker_brings_the_costs(Run):
    run = Run(Unbounded(), costs=UNEQUAL)
    run.begin(0, 1)
    run.push(1)
    state = run.coordinator.state_dict()
    again = Run(Unbounded(), costs=UNEQUAL)
    again.coordinator.load_state_dict(state)
    assert again.begin(1) == ["1: 0-2"]  # The claims that were open when the servers ended.
    assert again.begin(0) == ["0: 4-5"]
    while again.held[0] or again.held[1]:
        again.push(*(worker for worker in (0, 1) if again.held[worker]))
    assert sorted(run.positions + again.positions) == list(range(16))


def test_a_pass_without_costs_follows_one_with_costs(Run):
    run = Run(Unbounded(), workers=1, batch=4, costs=UNEQUAL[:6])
    assert run.begin(0) == ["0: 0-2"]
    run.push(0, 0, 0)
    run.costs = None
    assert run.begin(0, number=1) == ["0: 0-4"]


def test_costs_of_another_worker_change_nothing(Run):
    run = Run(Unbounded(), costs=UNEQUAL)
    run.begin(0)
    known = run.coordinator.claims.costs
    run.begin(1)
    assert run.coordinator.claims.costs is known
