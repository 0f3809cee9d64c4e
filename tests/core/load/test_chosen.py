"""`auto` on made-up workers: what it chooses, when, and that a checkpoint chooses alike."""

import json

import numpy as np
import pytest

from evenstep.core.load import Chosen
from evenstep.core.load.base import LoadPolicy
from evenstep.core.load.chosen import BALANCED, BY_EPOCH, EQUAL, ChosenPolicy
from evenstep.core.load.equal import equal_sizes
from evenstep.core.values import UNLIMITED, Allocation, Problem, Reports

BATCH = 120


class Wild(LoadPolicy):
    """In place of balanced sizes: less for the worker that was slow in the iteration before, or always for worker 0."""

    def __init__(self, *, learns=True):
        self.learns, self.slow = learns, 0

    def observe(self, reports):
        if self.learns:
            self.slow = int(np.argmax(reports.compute_microseconds / reports.samples))

    def allocate(self, problem):
        sizes = np.full(problem.workers, BATCH // problem.workers + 4, dtype=np.int64)
        sizes[self.slow] -= 4 * problem.workers
        return Allocation(sizes=sizes)

    def state_dict(self):
        return {"slow": self.slow}

    def load_state_dict(self, state):
        self.slow = state["slow"]


def problem(epoch, workers):
    ones = np.ones(workers, dtype=np.int64)
    return Problem(global_batch_size=BATCH, minimum=ones, maximum=ones * UNLIMITED, epoch=epoch)


def iterate(policy, epoch, pace, factors):
    """One iteration of workers with these milliseconds per sample, times the factors of the moment."""
    allocation = policy.allocate(problem(epoch, len(pace)))
    sizes, pace = allocation.sizes, np.array(pace)
    columns = {
        "samples": sizes,
        "compute_microseconds": (1000 * sizes * pace * factors).astype(np.int64),
        "nanoseconds_per_sample": pace * 10**6,
        "largest_size": np.full(len(pace), UNLIMITED),
    }
    zeros = np.zeros(len(pace), dtype=np.int64)
    policy.observe(Reports(**{name: columns.get(name, zeros) for name in Reports._fields}))
    return allocation


def train(policy, pace, *, epochs, iterations=60, first=0, factors=lambda k: 1.0):
    """The allocations of all iterations."""
    return [
        iterate(policy, epoch, pace, factors(epoch * iterations + k))
        for epoch in range(first, first + epochs)
        for k in range(iterations)
    ]


def test_it_begins_as_lb_bsp_and_keeps_to_it_where_it_gains():
    done = train(Chosen().policy(3), (10, 10, 20), epochs=3)
    assert done[1].sizes.tolist() == [48, 48, 24]
    assert {tuple(each.sizes.tolist()) for each in done[1:]} == {(48, 48, 24)}
    assert not any(each.why for each in done[:60])
    text = "auto uses lb-bsp: in the last 60 iterations, lb-bsp +64 % and dbs +0 % samples/s of compute over bsp"
    assert {each.why for each in done[60:120]} == {text}


def test_equal_workers_get_equal_sizes_at_the_end_of_an_epoch_and_not_before():
    policy = ChosenPolicy(Wild())
    generator = np.random.default_rng(0)
    noise = lambda k: 1 + 0.3 * generator.random(4)  # noqa: E731
    done = train(policy, (10, 10, 10, 10), epochs=2, factors=noise)
    assert all(each.sizes.min() == 18 for each in done[:60])
    assert all(each.sizes.tolist() == [30] * 4 for each in done[60:])
    assert done[60].why.startswith("auto uses bsp: ")


def test_sizes_of_the_last_epoch_are_chosen_where_those_of_the_moment_mislead():
    policy = ChosenPolicy(Wild(learns=False))
    generator = np.random.default_rng(0)
    done = train(policy, (10, 10, 20, 10), epochs=4, factors=lambda k: 1 + 0.1 * generator.random(4))
    # In the first epoch sizes by epoch are equal, too.
    assert done[60].why.startswith("auto uses bsp: ")
    assert done[-1].why.startswith("auto uses dbs: ")
    assert np.abs(done[-1].sizes - [34, 34, 17, 34]).max() <= 2


def test_a_change_of_the_machines_changes_the_choice_back():
    policy = Chosen().policy(2)
    assert train(policy, (10, 10), epochs=2)[-1].why.startswith("auto uses bsp: ")
    done = train(policy, (10, 30), epochs=2, first=2)
    assert done[-1].why.startswith("auto uses lb-bsp: ")
    assert done[-1].sizes.tolist() == [90, 30]


def test_a_choice_waits_for_fifty_iterations_over_several_epochs():
    done = train(Chosen().policy(2), (10, 10), epochs=8, iterations=10)
    assert [bool(each.why) for each in done] == [False] * 50 + [True] * 30


def test_the_short_last_slice_of_an_epoch_counts_for_nothing():
    policy = Chosen().policy(2)
    train(policy, (10, 10), epochs=1, iterations=49)
    short = equal_sizes(problem(0, 2)) // 2
    zeros = np.zeros(2, dtype=np.int64)
    policy.observe(Reports(short, short * 10, short * 0 + 10_000, zeros, zeros, zeros, zeros + UNLIMITED))
    assert not policy.allocate(problem(1, 2)).why


@pytest.mark.parametrize("after", [30, 60, 75, 130])
def test_a_checkpoint_chooses_alike_bit_for_bit(after):
    generator = np.random.default_rng(1)
    factors = 1 + 0.2 * generator.random((180, 3))
    whole, first, second = (Chosen().policy(3) for _ in range(3))
    expected = [iterate(whole, k // 60, (10, 10, 11), factors[k]) for k in range(180)]
    for k in range(after):
        iterate(first, k // 60, (10, 10, 11), factors[k])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    rest = [iterate(second, k // 60, (10, 10, 11), factors[k]) for k in range(after, 180)]
    assert [(each.sizes.tolist(), each.why) for each in rest] == [
        (each.sizes.tolist(), each.why) for each in expected[after:]
    ]


def test_the_choices_have_the_names_that_are_told():
    assert (EQUAL, BALANCED, BY_EPOCH) == (0, 1, 2)
