"""No worker is given more than the largest batch that it reported, whoever comes and goes."""

import json
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from evenstep.core.coordinate import Coordinator
from evenstep.core.coordinate.sizes import Sizes
from evenstep.core.groups import ByRank
from evenstep.core.load import Equal, Experts, LoadOf, PerEpoch, Static
from evenstep.core.load.pairwise import PairwisePolicy
from evenstep.core.sync import Grouped
from evenstep.core.values import UNLIMITED, Problem

LOADS = {
    "equal": lambda sizes: Equal(),
    "experts": lambda sizes: Experts(predictor="last", change_cost=0.0, warmup=0),
    "per epoch": lambda sizes: PerEpoch(),
    "pairwise": lambda sizes: LoadOf(make=partial(PairwisePolicy, window=2, warmup=0)),
    "static": lambda sizes: Static(sizes=sizes),
}


def problem(workers, batch, minimum=1, maximum=UNLIMITED, multiple=1):
    ones = np.ones(workers, dtype=np.int64)
    return Problem(global_batch_size=batch, minimum=ones * minimum, maximum=ones * maximum, multiple=multiple)


def sizes_of(load, present, problem, groups=None):
    sizes = Sizes(load, problem)
    if groups is not None:
        sizes.regroup(groups)
    for worker in present:
        sizes.join(worker)
    return sizes


def row(largest, samples=1, nanoseconds=1000):
    return (samples, samples * nanoseconds, 0, largest)


class AnyReports(RuleBasedStateMachine):
    """Workers report, join, leave and take claims in any order; a plain book of what each may have is kept."""

    make_load = None
    grouped = False

    @initialize(data=st.data())
    def start(self, data):
        self.count = data.draw(st.integers(1, 5))
        multiple = data.draw(st.sampled_from([1, 1, 4]))
        minimum = data.draw(st.integers(1, 3))
        self.least = -(-minimum // multiple) * multiple
        own = data.draw(st.lists(st.integers(self.least, 40), min_size=self.count, max_size=self.count))
        self.own = tuple(-(-size // multiple) * multiple for size in own)
        self.problem = problem(self.count, sum(self.own), minimum, multiple=multiple)
        if self.fixed:
            self.problem = problem(self.count, sum(self.own), minimum)
        self.groups = tuple(tuple(range(self.count))[at::2] for at in range(min(2, self.count)))
        self.epoch = 0
        self.present = set(range(self.count))
        self.latest = [UNLIMITED] * self.count
        self.smallest = [UNLIMITED] * self.count
        self.of = self.new()

    def new(self):
        load = type(self).make_load(self.own)
        return sizes_of(load, sorted(self.present), self.problem, self.groups if self.grouped else None)

    @property
    def fixed(self):
        return isinstance(type(self).make_load((1,)), Static)

    def limit(self, worker):
        return self.own[worker] if self.fixed else max(self.latest[worker], self.least)

    @precondition(lambda self: len(self.present) < self.count)
    @rule(data=st.data())
    def join(self, data):
        worker = data.draw(st.sampled_from(sorted({*range(self.count)} - self.present)))
        self.present.add(worker)
        self.of.join(worker)

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def leave(self, data):
        worker = data.draw(st.sampled_from(sorted(self.present)))
        self.present.discard(worker)
        self.of.leave(worker)
        self.latest[worker] = self.smallest[worker]

    @precondition(lambda self: self.present)
    @rule(data=st.data(), largest=st.one_of(st.integers(0, 60), st.just(UNLIMITED)), speed=st.integers(1, 9))
    def report(self, data, largest, speed):
        worker = data.draw(st.sampled_from(sorted(self.present)))
        samples = self.of.all()[worker]
        self.latest[worker] = largest
        self.smallest[worker] = min(largest, self.smallest[worker])
        self.of.observe(worker, row(largest, samples, speed * 1000))

    @precondition(lambda self: self.present)
    @rule(largest=st.integers(0, 60), speed=st.integers(1, 9))
    def report_all(self, largest, speed):
        for worker, samples in sorted(self.of.all().items()):
            self.latest[worker] = largest + worker
            self.smallest[worker] = min(largest + worker, self.smallest[worker])
            self.of.observe(worker, row(largest + worker, samples, (1 + worker * speed) * 1000))

    @precondition(lambda self: self.present)
    @rule(data=st.data(), unclaimed=st.integers(1, 300))
    def claim(self, data, unclaimed):
        worker = data.draw(st.sampled_from(sorted(self.present)))
        assert 1 <= self.of.next_of(worker, unclaimed) <= min(self.limit(worker), unclaimed)
        together = self.of.slice_of(tuple(sorted(self.present)), unclaimed)
        assert sum(together.values()) <= unclaimed
        assert all(size <= self.limit(worker) for worker, size in together.items())

    @rule()
    def begin_epoch(self):
        self.epoch += 1
        self.of.begin_epoch(self.epoch)

    @rule()
    def start_from_a_snapshot(self):
        state = json.loads(json.dumps(self.of.state_dict()))
        self.of = self.new()
        self.of.load_state_dict(state)
        self.smallest = list(self.latest)

    @invariant()
    def nobody_has_more_than_it_may_and_together_they_have_what_fits(self):
        if not hasattr(self, "of"):
            return
        sizes, multiple = self.of.all(), self.problem.multiple
        assert set(sizes) == self.present
        assert all(self.least <= size <= self.limit(worker) for worker, size in sizes.items())
        room = sum(self.limit(worker) // multiple * multiple for worker in self.present)
        assert sum(sizes.values()) == min(room, self.problem.global_batch_size)


@pytest.mark.parametrize("grouped", [False, True], ids=["all", "in groups"])
@pytest.mark.parametrize("load", LOADS)
def test_no_claim_exceeds_the_limit_that_its_worker_reported(load, grouped):
    machine = type("AnyReports", (AnyReports,), {"make_load": staticmethod(LOADS[load]), "grouped": grouped})
    run_state_machine_as_test(machine, settings=settings(max_examples=15, stateful_step_count=40, deadline=None))


@pytest.mark.parametrize("load", [Equal(), LOADS["experts"](()), PerEpoch(), LoadOf(make=PairwisePolicy)], ids=repr)
def test_a_survivor_keeps_its_limit_and_the_others_do_what_it_cannot(load):
    sizes = sizes_of(load, range(3), problem(3, 96))
    for worker, largest in enumerate((42, 64, 64)):
        sizes.observe(worker, row(largest, 32))
    sizes.leave(2)
    assert sizes.all() == {0: 42, 1: 54}


def test_a_limit_that_one_worker_learns_later_is_kept_at_once():
    sizes = sizes_of(Equal(), range(2), problem(2, 32))
    for worker in (0, 1, 1, 1):
        sizes.observe(worker, row(UNLIMITED, 16))
    sizes.observe(0, row(10, 16))
    assert sizes.all() == {0: 10, 1: 22}
    sizes.observe(0, row(12, 10))
    assert sizes.all() == {0: 12, 1: 20}


def test_a_worker_that_returns_has_the_smallest_limit_that_it_reported_until_it_reports():
    sizes = sizes_of(Equal(), range(2), problem(2, 32))
    for largest in (8, 12, 20):
        sizes.observe(0, row(largest))
    assert sizes.all() == {0: 16, 1: 16}
    sizes.leave(0)
    sizes.join(0)
    assert sizes.all() == {0: 8, 1: 24}
    sizes.observe(0, row(20))
    assert sizes.all() == {0: 16, 1: 16}


def test_when_all_hold_less_than_the_global_batch_they_share_what_they_hold_and_grow_again():
    sizes = sizes_of(Equal(), range(2), problem(2, 32))
    planned = []
    for _ in range(4):
        for worker, size in sizes.all().items() if planned else {0: 2, 1: 2}.items():  # a first slice that was short
            sizes.observe(worker, row(2 * size, size))
        planned.append(sizes.all())
    assert planned == [{0: 4, 1: 4}, {0: 8, 1: 8}, {0: 16, 1: 16}, {0: 16, 1: 16}]


def test_limits_outlast_new_groups():
    load, groups = Equal(), Grouped(grouping=ByRank(2))
    coordinator = Coordinator(sync=groups, load=load, problem=problem(4, 64), length=640)
    for worker in range(4):
        coordinator.join(worker)
    coordinator.sizes.observe(0, row(10, 16))
    for worker in range(4):
        coordinator.begin(worker, 0, 0, 0.0)
    assert coordinator.sizes.all() == {0: 10, 1: 22, 2: 16, 3: 16}
    again = Coordinator(sync=groups, load=load, problem=problem(4, 64), length=640)
    again.load_state_dict(json.loads(json.dumps(coordinator.state_dict())))
    for worker in range(4):
        again.join(worker)
    assert again.sizes.all() == {0: 10, 1: 18, 2: 18, 3: 18}
