"""What the pairwise tuner makes of whole runs, in virtual time, and of single windows."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.cluster.slowness import MEASURED_CURVES, PointCurve
from evenstep.core.load import LoadOf
from evenstep.core.load.pairwise import PairwisePolicy
from evenstep.core.values import UNLIMITED, Problem, Reports

TABLE = np.array(
    [[device.seconds(size) for size in range(513)] for device in map(PointCurve.measured, MEASURED_CURVES)]
)


def ints(values):
    return np.array(values, dtype=np.int64)


def problem(batch, workers, **changes):
    whole = Problem(global_batch_size=batch, minimum=ints([1] * workers), maximum=ints([UNLIMITED] * workers))
    return replace(whole, **changes)


def report(samples, seconds):
    nothing = ints([0] * len(samples))
    return Reports(
        samples=ints(samples),
        compute_microseconds=ints([round(1e6 * time) for time in seconds]),
        forecast=nothing,
        largest_size=nothing + UNLIMITED,
    )


def trained(policy, asked, iterations, seconds):
    """The sizes of all iterations; `seconds` of (worker, iteration, samples)."""
    sizes = []
    for k in range(iterations):
        sizes.append(policy.allocate(asked).sizes)
        policy.observe(report(sizes[-1], [seconds(i, k, int(x)) for i, x in enumerate(sizes[-1])]))
    return np.array(sizes)


def proportional(*rates):
    return lambda worker, k, size: rates[worker] * size


def moves(sizes):
    return (np.flatnonzero((np.diff(sizes, axis=0) != 0).any(axis=1)) + 1).tolist()


def best(table, batch):
    """The least time within which the largest sizes of all workers sum to the batch."""
    return next(t for t in np.unique(table) if sum(np.flatnonzero(row <= t).max(initial=0) for row in table) >= batch)


def makespan(table, sizes):
    return table[np.arange(len(table)), sizes].max(axis=1)


@pytest.mark.parametrize("level", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("seed", range(3))
def test_four_measured_devices_are_balanced_within_sixty_iterations(run, noise, level, seed):
    factors = noise(level, seed, (300, 4))
    sizes, _ = run(4, 512, 300, lambda i, k, x: TABLE[i, x] * factors[k, i], load=LoadOf(make=PairwisePolicy))
    relative = makespan(TABLE, sizes) / best(TABLE, 512)
    assert relative[0] > 4.0
    assert (relative[60:] <= 1.05).all()
    assert (sizes.sum(axis=1) == 512).all()
    assert np.abs(sizes[-1] - [169, 169, 159, 15]).max() <= 4
    assert not moves(sizes[200:])


def test_a_small_first_step_takes_as_long_as_the_paper_would(run):
    seconds = lambda i, k, x: TABLE[i, x]  # noqa: E731
    near = {}
    for step in (1, 5, None):
        sizes, _ = run(4, 512, 700, seconds, load=LoadOf(make=partial(PairwisePolicy, step=step)))
        near[step] = np.flatnonzero(makespan(TABLE, sizes) <= 1.05 * best(TABLE, 512))[0]
    assert near[None] < 60 < near[5] < 200 < near[1]


def test_late_reports_lead_to_the_same_sizes(run):
    policy, asked = PairwisePolicy(4), problem(512, 4)
    late = None
    for _ in range(150):
        sizes = policy.allocate(asked).sizes
        policy.observe(report([0] * 4, [0.0] * 4) if late is None else late)
        late = report(sizes, TABLE[np.arange(4), sizes])
    prompt, _ = run(4, 512, 150, lambda i, k, x: TABLE[i, x], load=LoadOf(make=PairwisePolicy))
    assert sizes.tolist() == prompt[-1].tolist()


def test_multiples(run):
    sizes, _ = run(4, 512, 200, lambda i, k, x: TABLE[i, x], load=LoadOf(make=PairwisePolicy))
    coarse = trained(PairwisePolicy(4), problem(512, 4, multiple=8), 200, lambda i, k, x: TABLE[i, x])
    assert not (coarse % 8).any()
    assert (sizes % 8).any()
    multiples = np.full_like(TABLE, np.inf)
    multiples[:, ::8] = TABLE[:, ::8]
    assert makespan(TABLE, coarse)[-1] <= 1.05 * best(multiples, 512)


@pytest.mark.parametrize("level", [0.0, 0.03])
@pytest.mark.parametrize(("worker", "factor"), [(0, 2.0), (0, 1.3), (3, 2.0), (3, 1 / 3)])
def test_a_persistent_change_is_met_and_its_end_too(run, noise, level, worker, factor):
    factors = noise(level, 1, (750, 4))
    factors[150:450, worker] *= factor
    sizes, _ = run(4, 512, 750, lambda i, k, x: TABLE[i, x] * factors[k, i], load=LoadOf(make=PairwisePolicy))
    changed = TABLE * np.where(np.arange(4) == worker, factor, 1.0)[:, np.newaxis]
    after = makespan(changed, sizes) / best(changed, 512)
    assert after[150] > 1.1
    assert after[350:450].mean() <= 1.05
    again = makespan(TABLE, sizes) / best(TABLE, 512)
    assert again[650:].mean() <= 1.05


def test_a_slow_drift_is_followed(run):
    slowdown = 1.0 + 2.0 * np.clip((np.arange(1000) - 100) / 600, 0.0, 1.0)
    _, times = run(
        4, 512, 1000, lambda i, k, x: TABLE[i, x] * (slowdown[k] if i == 0 else 1.0), load=LoadOf(make=PairwisePolicy)
    )
    optima = [best(TABLE * [[slowdown[k]], [1.0], [1.0], [1.0]], 512) for k in range(100, 1000, 100)]
    assert times.max(axis=1)[100:].mean() <= 1.06 * np.mean(optima)


@pytest.mark.parametrize(("workers", "level"), [(2, 0.1), (4, 0.3), (16, 0.3)])
def test_jitter_on_equal_workers_costs_no_more_than_one_per_cent(run, noise, workers, level):
    for seed in range(2):
        factors = noise(level, seed, (300, workers))
        load = LoadOf(make=PairwisePolicy)
        sizes, times = run(workers, 64 * workers, 300, lambda i, k, x, f=factors: 1e-3 * x * f[k, i], load=load)
        assert times.max(axis=1).mean() <= 1.01 * 64e-3 * factors.max(axis=1).mean()
        assert len(moves(sizes)) <= 12


def test_a_single_odd_iteration_moves_nothing(run, noise):
    factors = noise(0.02, 0, (200, 4))
    factors[100, 2] *= 10.0
    sizes, _ = run(4, 512, 200, lambda i, k, x: TABLE[i, x] * factors[k, i], load=LoadOf(make=PairwisePolicy))
    assert (sizes[95:] == sizes[95]).all()


def test_a_window_and_one_iteration_to_settle_between_two_moves():
    sizes = trained(PairwisePolicy(2, window=5, warmup=3), problem(120, 2), 21, proportional(3e-3, 1e-3))
    assert moves(sizes) == [8, 14, 20]
    assert sizes[[7, 8, 14, 20]].tolist() == [[60, 60], [50, 70], [40, 80], [30, 90]]


def test_oscillation_halves_the_step_and_doubles_the_window():
    # Whoever has more than 64 samples is the slower by far.
    def seconds(worker, k, size):
        return 0.2 if size > 64 else 0.1 if size < 64 else 0.2 - 0.1 * worker

    sizes = trained(PairwisePolicy(2, window=2, step=16, warmup=0), problem(128, 2), 40, seconds)
    # Two iterations, then one left out and two; one left out and four, twice; one left out and eight.
    assert moves(sizes)[:5] == [2, 5, 10, 15, 24]
    assert sizes[[1, 2, 5, 10, 15, 24]].tolist() == [[64, 64], [48, 80], [56, 72], [64, 64], [60, 68], [62, 66]]


def test_one_multiple_to_and_fro_is_taken_back_and_left_alone():
    # As at the edge of a tile: the 49th sample of worker 1 costs more than worker 0 gains.
    def seconds(worker, k, size):
        return 0.110 if worker == 0 and size >= 48 else 0.104 if worker == 0 else 0.100 if size <= 48 else 0.123

    sizes = trained(PairwisePolicy(2, step=1), problem(96, 2), 200, seconds)
    assert sizes.min(axis=0).tolist() == [47, 48]
    assert len(moves(sizes)) == 2
    assert sizes[-1].tolist() == [48, 48]


def test_rest_ends_with_the_full_step():
    def seconds(worker, k, size):
        return 1e-3 * size * (3.0 if worker == 0 and k >= 100 else 1.0)

    policy = PairwisePolicy(2)
    sizes = trained(policy, problem(240, 2), 160, seconds)
    assert moves(sizes[:101]) == []
    first = moves(sizes)[0]
    assert first <= 115
    assert sizes[first].tolist() == [100, 140]
    assert np.abs(sizes[-1] - [60, 180]).max() <= 3


def test_a_step_that_proves_too_small_grows_again():
    # The speed changes while the step is small, so that there is no rest to end.
    def seconds(worker, k, size):
        slow = 1.0 if k < 40 else 4.0
        return 1e-3 * (size if worker else 3.0 * slow * size)

    policy = PairwisePolicy(2, window=2, step=60, warmup=0)
    sizes = trained(policy, problem(480, 2), 200, seconds)
    assert np.abs(sizes[-1] - [37, 443]).max() <= 2


def test_a_leader_without_memory_is_passed_over():
    # Inception-v3 on an M60, a K80 and a second K80, slowed: the fastest has less memory than the others.
    limits = problem(225, 3, maximum=ints([75, 115, 115]))
    sizes = trained(PairwisePolicy(3), limits, 150, proportional(1 / 917, 1 / 628, 3 / 628))
    assert sizes[0].tolist() == [75, 75, 75]
    assert (sizes[:, 0] == 75).all()
    assert np.abs(sizes[-1] - [75, 112, 38]).max() <= 2


def test_a_straggler_at_its_minimum_is_passed_over():
    limits = problem(96, 3, minimum=ints([1, 1, 32]))
    sizes = trained(PairwisePolicy(3), limits, 150, proportional(1e-3, 3e-3, 9e-3))
    assert (sizes[:, 2] == 32).all()
    assert np.abs(sizes[-1] - [48, 16, 32]).max() <= 1


def test_no_size_is_more_than_halved_or_doubled_at_once():
    sizes = trained(PairwisePolicy(2, step=1000), problem(128, 2), 120, proportional(40e-3, 1e-3))
    assert sizes[moves(sizes)[:5]].tolist() == [[32, 96], [16, 112], [8, 120], [4, 124], [2, 126]]


def test_a_limit_learnt_later_is_kept_at_once():
    policy = PairwisePolicy(4)
    trained(policy, problem(512, 4), 100, lambda i, k, x: TABLE[i, x])
    limited = problem(512, 4, maximum=ints([140, 512, 512, 512]))
    sizes = trained(policy, limited, 150, lambda i, k, x: TABLE[i, x])
    assert sizes[0, 0] == 140
    assert (sizes[:, 0] <= 140).all()
    assert (sizes.sum(axis=1) == 512).all()
    capped = np.where((np.arange(513) > 140) & (np.arange(4) == 0)[:, np.newaxis], np.inf, TABLE)
    assert makespan(TABLE, sizes)[-1] <= 1.05 * best(capped, 512)


def test_an_epochs_last_slice_leaves_nothing_behind():
    plain, policy = PairwisePolicy(4), PairwisePolicy(4)
    for k in range(80):
        expected = trained(plain, problem(512, 4), 1, lambda i, k, x: TABLE[i, x])[0]
        assert trained(policy, problem(512, 4), 1, lambda i, k, x: TABLE[i, x])[0].tolist() == expected.tolist()
        if k % 7 == 6:
            short = trained(policy, problem(30, 4), 1, lambda i, k, x: TABLE[i, x])[0]
            assert short.sum() == 30
    assert short.tolist() == [10, 10, 9, 1]


def test_another_global_batch_that_stays_is_tuned():
    policy = PairwisePolicy(2)
    sizes = trained(policy, problem(90, 2), 100, proportional(2e-3, 1e-3))[-1]
    assert np.abs(sizes - [30, 60]).max() <= 1
    larger = trained(policy, problem(900, 2), 150, proportional(1e-3, 2e-3))
    assert np.abs(larger[0] - [300, 600]).max() <= 10
    assert np.abs(larger[-1] - [600, 300]).max() <= 6


def test_reports_that_tell_nothing_move_nothing():
    policy, asked = PairwisePolicy(2), problem(128, 2)
    for samples in ([64, 0], [0, 64], [64, 60], [32, 32]):
        for _ in range(30):
            assert policy.allocate(asked).sizes.tolist() == [64, 64]
            policy.observe(report(samples, [0.3, 0.1]))
    assert moves(trained(policy, asked, 8, proportional(3e-3, 1e-3))) == [7]


def test_a_run_resumed_after_any_iteration_decides_alike(noise):
    factors = noise(0.03, 0, (250, 4))
    factors[120:, 1] *= 2.0
    policy, plain, asked = PairwisePolicy(4), PairwisePolicy(4), problem(512, 4)
    for k in range(250):
        sizes = policy.allocate(asked).sizes
        assert plain.allocate(asked).sizes.tolist() == sizes.tolist()
        measured = report(sizes, TABLE[np.arange(4), sizes] * factors[k])
        policy.observe(measured)
        plain.observe(measured)
        resumed = PairwisePolicy(4)
        resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
        assert resumed.state_dict() == policy.state_dict()
        policy = resumed
    assert sizes.tolist() != [128] * 4


def test_another_number_of_workers_starts_equal_again():
    policy = PairwisePolicy(2)
    trained(policy, problem(90, 2), 60, proportional(2e-3, 1e-3))
    assert policy.allocate(problem(90, 3)).sizes.tolist() == [30, 30, 30]
    sizes = trained(policy, problem(90, 3), 100, proportional(2e-3, 2e-3, 1e-3))
    assert np.abs(sizes[-1] - [22, 23, 45]).max() <= 1


@settings(max_examples=25)
@given(st.data())
def test_the_limits_hold_whatever_was_measured(data):
    workers, multiple = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    batch = 24 * workers * multiple
    step = data.draw(st.one_of(st.none(), st.integers(1, 99)))
    policy = PairwisePolicy(workers, window=2, step=step, warmup=0)
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for _ in range(12):
        minimum = generator.integers(0, 23 * multiple, workers)
        maximum = generator.integers(25 * multiple, 99 * multiple, workers)
        asked = problem(batch, workers, minimum=minimum, maximum=maximum, multiple=multiple)
        rates = generator.integers(1, 1000, workers) * 1e-5
        for sizes in trained(policy, asked, 6, proportional(*rates)):
            assert sizes.sum() == batch
            assert ((minimum <= sizes) & (sizes <= maximum)).all()
            assert not (sizes % multiple).any()
