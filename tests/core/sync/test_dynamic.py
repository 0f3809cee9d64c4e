from heapq import heappop, heappush

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evenstep.core.sync import Dynamic, Push, Release
from evenstep.core.sync.dynamic import extra_iterations

SECONDS = st.one_of(st.integers(0, 20).map(float), st.floats(0.0, 1e9))


def extra(interval, slowest_interval, due, most, allowed=None):
    return extra_iterations(
        interval_seconds=interval,
        slowest_interval_seconds=slowest_interval,
        slowest_due_seconds=due,
        most=most,
        allowed=most if allowed is None else allowed,
    )


def push(worker, iteration):
    return Push(worker=worker, iteration=iteration, samples=1, units=1, share=0.5, version=0)


def releases(commands):
    return [(command.worker, command.lead, command.bound) for command in commands if isinstance(command, Release)]


@given(SECONDS, SECONDS, st.one_of(SECONDS, SECONDS.map(lambda due: -due)), st.integers(0, 12), st.integers(0, 12))
@example(1.0, 5e-324, 3.0, 4, 4)
@example(4.0, 1.0, 1.0, 4, 1)
def test_the_controller_finds_what_trying_every_pair_finds(interval, slowest_interval, due, most, allowed):
    def apart(k, r):
        return abs((r * interval - due) - k * slowest_interval)

    found = extra(interval, slowest_interval, due, most, allowed)
    least = min(apart(k, r) for k in range(most + 1) for r in range(min(most, allowed) + 1))
    assert min(apart(k, found) for k in range(most + 1)) == pytest.approx(least, rel=1e-12, abs=1e-6)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(-20, 20), st.integers(0, 8))
def test_of_equally_good_numbers_of_iterations_the_controller_takes_the_smallest(interval, slowest_interval, due, most):
    pairs = [(abs(due + k * slowest_interval - r * interval), r) for k in range(most + 1) for r in range(most + 1)]
    assert extra(float(interval), float(slowest_interval), float(due), most) == min(pairs)[1]


@pytest.mark.parametrize(
    ("interval", "slowest_interval", "due", "most", "expected"),
    [
        (1.0, 4.0, 3.0, 4, 3),  # Fig. 2
        (1.0, 4.0, 9.0, 4, 4),  # the nearest that is allowed
        (1.0, 4.0, 0.2, 4, 0),  # the slowest is about to push
        (3.0, 4.0, 5.0, 4, 3),  # its push after the next: 9 and 9
        (1.0, 2.0, 1.5, 4, 1),  # 1 and 2 are as near
        (1.0, 4.0, -1.0, 4, 3),  # overdue, and expected again in 3 s
        (1.0, 4.0, 3.0, 0, 0),
        (0.0, 0.0, 0.0, 4, 0),
    ],
)
def test_the_controller_answers(interval, slowest_interval, due, most, expected):
    assert extra(interval, slowest_interval, due, most) == expected


class Printed:
    """The paper's Algorithms 1 and 2 line by line, with the deviations that `DynamicPolicy` lists and no others."""

    def __init__(self, workers, lower, upper, bounded):
        self.lower, self.r_max, self.upper, self.bounded = lower, upper - lower, upper, bounded
        self.t, self.r, self.released = [0] * workers, [0] * workers, [0.0] * workers
        self.interval, self.came, self.waiting, self.pushes = [None] * workers, list(range(workers)), set(), 0

    def push(self, p, now):
        """Who is released."""
        slowest_before = min(self.t)
        self.t[p] += 1
        self.pushes += 1
        self.interval[p], self.came[p] = now - self.released[p], len(self.t) + self.pushes
        self.waiting.add(p)
        if self.r[p] > 0:
            self.r[p] -= 1
            ok = {p}
        elif self.t[p] - min(self.t) > self.lower and self.t[p] == max(self.t):
            granted = self.controller(p, now)
            self.r[p] = max(granted - 1, 0)
            ok = {p} if granted else set()
        else:
            ok = set()
        if not self.bounded and min(self.t) > slowest_before:
            ok |= self.waiting
        ok |= {worker for worker in self.waiting if self.t[worker] - min(self.t) <= self.lower}
        self.waiting -= ok
        for worker in ok:
            self.released[worker] = now
        return ok

    def controller(self, p, now):
        s = max((worker for worker in range(len(self.t)) if self.t[worker] == min(self.t)), key=self.came.__getitem__)
        if self.interval[s] is None:
            return 0
        sim_p = [now + r * self.interval[p] for r in range(self.r_max + 1)]
        sim_s = [self.released[s] + self.interval[s] + k * self.interval[s] for k in range(self.r_max + 1)]
        if self.bounded:
            del sim_p[self.upper + 2 - (self.t[p] - min(self.t)) :]
        return min((abs(due - pushed), r) for r, pushed in enumerate(sim_p) for due in sim_s)[1]


@pytest.mark.parametrize("bounded", [True, False])
def test_random_runs_are_those_of_the_algorithms_as_printed(bounded):
    for seed in range(150):
        generator = np.random.default_rng(seed)
        workers, lower = int(generator.integers(2, 6)), int(generator.integers(0, 4))
        upper = lower + int(generator.integers(0, 9))
        speeds, spread = generator.integers(1, 40, workers), int(generator.integers(1, 20))
        policy = Dynamic(lower=lower, upper=upper, bounded=bounded).policy(workers)
        printed = Printed(workers, lower, upper, bounded)
        running, done = [], [0] * workers

        def compute(worker, now, running=running, speeds=speeds, generator=generator, spread=spread):
            # Whole seconds, so that neither implementation rounds.
            heappush(running, (now + float(speeds[worker] + generator.integers(0, spread)), worker))

        for worker in range(workers):
            policy.on_join(worker, 0.0)
            compute(worker, 0.0)
        for _ in range(120):
            now, worker = heappop(running)
            commands = policy.on_push(push(worker, done[worker]), now)
            done[worker] += 1
            released = [command.worker for command in commands if isinstance(command, Release)]
            assert set(released) == printed.push(worker, now), f"seed {seed}, at {now} s"
            for each in released:
                compute(each, now)


def started(**limits):
    """Worker 0 takes 1 s, worker 1 takes 4 s; at 5 s worker 0 is two ahead and asks, and worker 1 is due at 8 s."""
    policy = Dynamic(**limits).policy(4)
    for worker in (0, 1):
        policy.on_join(worker, 0.0)
    assert releases(policy.on_push(push(0, 0), 1.0)) == [(0, 1, 1)]
    assert releases(policy.on_push(push(0, 1), 2.0)) == []  # nothing is known of worker 1 yet
    assert releases(policy.on_push(push(1, 0), 4.0)) == [(1, 0, 1), (0, 1, 1)]
    return policy


@pytest.mark.parametrize("bounded", [True, False])
def test_figure_2_grants_three_iterations_and_not_four(bounded):
    policy = started(lower=1, upper=5, bounded=bounded)
    assert releases(policy.on_push(push(0, 2), 5.0)) == [(0, 2, 4)]
    assert releases(policy.on_push(push(0, 3), 6.0)) == [(0, 3, 4)]
    assert releases(policy.on_push(push(0, 4), 7.0)) == [(0, 4, 4)]
    assert releases(policy.on_push(push(1, 1), 8.0)) == [(1, 0, 1)]
    # Worker 0 pushes at the same moment and asks anew: the next push of worker 1 is 4 s away.
    assert releases(policy.on_push(push(0, 5), 8.0))[0][:2] == (0, 4)


def test_a_grant_ends_at_the_upper_limit_however_much_later_is_better():
    policy = started(lower=1, upper=3)
    assert releases(policy.on_push(push(0, 2), 5.0)) == [(0, 2, 3)]
    assert releases(policy.on_push(push(0, 3), 6.0)) == [(0, 3, 3)]
    assert releases(policy.on_push(push(0, 4), 7.0)) == []
    assert releases(policy.on_push(push(1, 1), 8.0)) == [(1, 0, 1)]  # worker 0 waits until its lead is lower
    assert releases(policy.on_push(push(1, 2), 12.0)) == [(1, 0, 1)]
    assert releases(policy.on_push(push(1, 3), 16.0)) == [(1, 0, 1), (0, 1, 1)]


def test_without_a_bound_a_held_worker_waits_for_the_next_push_of_the_slowest_alone():
    policy = started(lower=1, upper=5, bounded=False)
    for iteration in (2, 3, 4):
        policy.on_push(push(0, iteration), 3.0 + iteration)
    assert releases(policy.on_push(push(0, 5), 7.9)) == []  # worker 1 is due at 8
    assert releases(policy.on_push(push(1, 1), 8.0)) == [(1, 0, 1), (0, 4, None)]


def test_intervals_do_not_contain_the_time_held():
    policy = started(lower=1, upper=5)
    assert policy.state_dict() == {"interval_seconds": [[0, 1.0], [1, 4.0]]}
    policy.on_push(push(0, 2), 5.0)  # held from 2 to 4
    assert policy.state_dict() == {"interval_seconds": [[0, 1.0], [1, 4.0]]}


def test_only_the_fastest_asks():
    policy = Dynamic(lower=0, upper=9).policy(4)
    for worker in (0, 1, 2):
        policy.on_join(worker, 0.0)
    for worker in (0, 1, 2):
        policy.on_push(push(worker, 0), 1.0 if worker < 2 else 8.0)
    assert releases(policy.on_push(push(0, 1), 9.0)) == [(0, 1, 7)]
    assert releases(policy.on_push(push(0, 2), 10.0)) == [(0, 2, 7)]
    assert releases(policy.on_push(push(1, 1), 11.0)) == []


def test_extra_iterations_are_kept_by_one_that_is_no_longer_the_fastest():
    policy = Dynamic(lower=0, upper=9).policy(4)
    for worker in (0, 1, 2):
        policy.on_join(worker, 0.0)
    for worker in (0, 1, 2):
        policy.on_push(push(worker, 0), 1.0 if worker < 2 else 8.0)
    assert releases(policy.on_push(push(0, 1), 9.0)) == [(0, 1, 7)]
    assert releases(policy.on_push(push(1, 1), 9.0)) == [(1, 1, 7)]
    assert releases(policy.on_push(push(0, 2), 10.0)) == [(0, 2, 7)]
    assert releases(policy.on_push(push(1, 2), 10.5)) == [(1, 2, 7)]
    assert releases(policy.on_push(push(1, 3), 11.0)) == [(1, 3, 7)]
    assert releases(policy.on_push(push(0, 3), 12.0)) == [(0, 3, 7)]  # at its grant; now level
    policy.on_push(push(1, 4), 12.0)
    assert releases(policy.on_push(push(0, 4), 13.0)) == [(0, 4, 7)]


def test_of_several_slowest_the_one_that_came_last_is_waited_for():
    policy = Dynamic(lower=0, upper=9).policy(4)
    for worker in (0, 1, 2):
        policy.on_join(worker, 0.0)
    for worker, now in ((0, 1.0), (1, 3.0), (2, 5.0)):
        policy.on_push(push(worker, 0), now)
    # Workers 1 and 2 take 3 and 5 s, both released at 5; worker 2 came last.
    assert releases(policy.on_push(push(0, 1), 6.0)) == [(0, 1, 4)]


def test_a_slowest_worker_of_unknown_speed_is_waited_for():
    policy = started(lower=1, upper=5)
    policy.on_join(2, 4.5)
    assert releases(policy.on_push(push(0, 2), 5.0)) == []


def test_extra_iterations_do_not_outlast_a_leave():
    policy = started(lower=1, upper=5)
    policy.on_push(push(0, 2), 5.0)
    policy.on_leave(0, 5.5)
    policy.on_join(0, 5.5)
    assert releases(policy.on_push(push(0, 3), 6.5)) == [(0, 1, 1)]
    assert releases(policy.on_push(push(0, 4), 7.9)) == []


@pytest.mark.parametrize("seed", range(20))
def test_the_lead_stays_within_the_upper_limit_under_any_speeds(drive, seed):
    generator = np.random.default_rng(seed)
    speeds = np.exp(generator.normal(0.0, 1.0, 4))
    jitter = np.exp(generator.normal(0.0, 0.5, (4, 10_000)))
    run = drive(Dynamic(lower=1, upper=4).policy(4), lambda i, k: float(speeds[i] * jitter[i, k]), 4, 200.0)
    assert 1 <= run.watched.largest_lead <= 4
