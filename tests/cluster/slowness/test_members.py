"""Each member of the family of disturbances, value by value."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.cluster.slowness import (
    AffineCurve,
    Chain,
    Constant,
    Device,
    Disturbance,
    Episodic,
    From,
    Jitter,
    PerWorker,
    PointCurve,
    Trace,
)
from evenstep.cluster.slowness.draw import derive_seed
from evenstep.core.errors import ConfigError
from evenstep.core.values import UNLIMITED

LINE = AffineCurve(fixed_seconds=0.25, seconds_per_sample=0.5)
SEEDED: dict[str, Callable[[int], Disturbance]] = {
    "episodic": lambda seed: Episodic(factor=3, period=20, shortest=1, longest=10, seed=seed),
    "jitter": lambda seed: Jitter(spread=0.2, seed=seed),
    "chain": lambda seed: Chain(
        parts=(Jitter(spread=0.2, seed=seed), Episodic(period=9, shortest=0, longest=9, seed=seed))
    ),
}
EVERY_MEMBER: dict[str, Disturbance] = {
    "undisturbed": Chain(),
    "constant": Constant(worker=1),
    "from": From(first=3, until=9),
    "trace": Trace(factors=(1.0, 2.5)),
    "device": Device(curve=PointCurve.measured("gtx750")),
    "per-worker": PerWorker(parts_by_worker=(Chain(), Constant()) * 50),
    **{name: make(7) for name, make in SEEDED.items()},
}


def ask(
    disturbance: Disturbance, *, worker: int = 0, iteration: int = 0, batch_size: int = 1, natural_seconds: float = 1.0
) -> float:
    """The seconds at time 0."""
    return disturbance.seconds(
        worker=worker, iteration=iteration, batch_size=batch_size, natural_seconds=natural_seconds
    )


@pytest.mark.parametrize("name", EVERY_MEMBER)
@settings(derandomize=True, max_examples=25, deadline=None)
@given(questions=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 10**12)), max_size=8), data=st.data())
def test_answers_do_not_depend_on_what_was_asked_before(
    name: str, questions: list[tuple[int, int]], data: st.DataObject
) -> None:
    member = EVERY_MEMBER[name]
    answers = {(w, i): ask(member, worker=w, iteration=i) for w, i in questions}
    for w, i in data.draw(st.permutations(questions)):
        assert ask(member, worker=w, iteration=i) == answers[w, i]
        assert 0 <= answers[w, i] < math.inf


@pytest.mark.parametrize("name", SEEDED)
def test_equal_seeds_agree_and_other_seeds_and_workers_differ(name: str) -> None:
    def trace(seed: int, worker: int) -> list[float]:
        return [ask(SEEDED[name](seed), worker=worker, iteration=i) for i in range(60)]

    assert trace(0, 0) == trace(0, 0)
    assert len({tuple(trace(seed, worker)) for seed in (0, 1, 2**64 - 1) for worker in (0, 1, 9999)}) == 9


def test_draws_stay_the_same_from_release_to_release() -> None:
    assert ask(Jitter(spread=0.1, seed=0)) == pytest.approx(1.0113076051045555, rel=1e-12)
    assert ask(Jitter(spread=0.1, seed=3), worker=2, iteration=1000) == pytest.approx(1.0669469828011033, rel=1e-12)
    assert Episodic(period=200, shortest=10, longest=50, seed=0).episode(worker=3, number=5) == range(1007, 1021)
    assert derive_seed(0, "busy") == 5814340242114715050


def test_undisturbed_gives_the_natural_seconds() -> None:
    assert ask(Chain(), natural_seconds=0.3) == 0.3


def test_constant_slows_its_worker_only() -> None:
    slow = Constant(worker=3, factor=2.0, extra_seconds=0.5)
    assert ask(slow, worker=3, natural_seconds=2.0) == 4.5
    assert ask(slow, worker=2, natural_seconds=2.0) == 2.0


@pytest.mark.parametrize(
    "member", [Constant(factor=2), From(factor=2, first=0), Trace(factors=(2,)), Chain(parts=(Constant(factor=2),))]
)
def test_no_worker_means_every_worker(member: Disturbance) -> None:
    assert [ask(member, worker=w) for w in (0, 5)] == [2, 2]


def test_from_is_slow_in_its_interval_only() -> None:
    assert [ask(From(factor=3, first=2, until=4), iteration=i) for i in range(6)] == [1, 1, 3, 3, 1, 1]
    assert [ask(From(factor=3, first=2), iteration=i) for i in (1, 2, 10**9)] == [1, 3, 3]


def test_trace_repeats() -> None:
    assert [ask(Trace(factors=(1, 4, 0.5)), iteration=i) for i in range(7)] == [1, 4, 0.5, 1, 4, 0.5, 1]


@pytest.mark.parametrize("spread", [0.0, 0.05, 0.5])
def test_jitter_has_mean_1_and_the_spread_asked_for(spread: float) -> None:
    jitter = Jitter(spread=spread, seed=1)
    factors = np.array([ask(jitter, worker=w, iteration=i) for w in range(4) for i in range(2500)])
    # Four standard errors of the mean; the standard deviation of a skewed distribution needs a wider margin.
    assert abs(factors.mean() - 1) <= 4 * spread / math.sqrt(len(factors))
    assert factors.std() == pytest.approx(spread, rel=0.08)
    assert (factors > 0).all()


def test_jitter_of_neighbours_is_unrelated() -> None:
    jitter = Jitter(spread=0.3, seed=2)
    table = np.array([[ask(jitter, worker=w, iteration=i) for i in range(2000)] for w in range(2)])
    assert abs(np.corrcoef(table)[0, 1]) < 0.08
    assert abs(np.corrcoef(table[0, :-1], table[0, 1:])[0, 1]) < 0.08


@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data(), period=st.integers(1, 60), worker=st.integers(0, 9), number=st.integers(0, 10**9))
def test_each_period_holds_one_episode_of_allowed_length(
    data: st.DataObject, period: int, worker: int, number: int
) -> None:
    longest = data.draw(st.integers(0, period))
    shortest = data.draw(st.integers(0, longest))
    member = Episodic(factor=2, period=period, shortest=shortest, longest=longest, seed=5)
    iterations = range(number * period, (number + 1) * period)
    slow = [i for i in iterations if ask(member, worker=worker, iteration=i) == 2]
    assert slow == list(member.episode(worker=worker, number=number))
    assert shortest <= len(slow) <= longest


def test_episodes_have_the_documented_duty_lengths_and_starts() -> None:
    member = Episodic(period=20, shortest=2, longest=6, seed=0)
    episodes = [member.episode(worker=0, number=n) for n in range(4000)]
    lengths = np.bincount([len(e) for e in episodes])
    assert lengths[:2].sum() == 0
    assert lengths[2:] == pytest.approx(800, rel=0.15)
    assert sum(len(e) for e in episodes) / (4000 * 20) == pytest.approx((2 + 6) / (2 * 20), rel=0.03)
    longest_starts = np.bincount([e.start - n * 20 for n, e in enumerate(episodes) if len(e) == 6], minlength=15)
    assert len(longest_starts) == 15
    assert (longest_starts > 0).all()


def test_a_chain_hands_each_part_the_seconds_of_the_one_before() -> None:
    extra, double, device = Constant(factor=1, extra_seconds=1), Constant(factor=2), Device(curve=LINE)
    assert ask(Chain(parts=(extra, double))) == 4
    assert ask(Chain(parts=(double, extra))) == 3
    assert ask(Chain(parts=(double, device, extra)), batch_size=4) == 3.25
    assert ask(Chain(parts=())) == 1


def test_a_chain_may_stand_in_a_chain() -> None:
    parts = Constant(factor=2), Constant(factor=1, extra_seconds=1), Jitter(spread=0.1, seed=0)
    assert ask(Chain(parts=(Chain(parts=parts[:2]), parts[2]))) == ask(Chain(parts=parts))


def test_per_worker_gives_each_worker_its_own_part() -> None:
    cluster = PerWorker(parts_by_worker=(Chain(), Constant(factor=2), Jitter(spread=0.1, seed=0)))
    assert [ask(cluster, worker=w) for w in (0, 1)] == [1, 2]
    assert ask(cluster, worker=2) == ask(Jitter(spread=0.1, seed=0), worker=2)


@pytest.mark.parametrize("worker", [-1, 2])
def test_per_worker_refuses_a_worker_that_it_does_not_know(worker: int) -> None:
    with pytest.raises(ConfigError, match=rf"worker {worker} is not described, only workers 0 to 1 are"):
        ask(PerWorker(parts_by_worker=(Chain(), Chain())), worker=worker)


def test_a_device_replaces_the_natural_seconds() -> None:
    assert [ask(Device(curve=LINE), batch_size=4, natural_seconds=s) for s in (0.0, 9.0)] == [2.25, 2.25]
    assert Device(curve=LINE).largest_batch == UNLIMITED


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(worker=-1), "worker must be a whole number of at least 0, not -1"),
        (lambda: Constant(factor=0.5), "factor must be a finite number of at least 1, not 0.5"),
        (lambda: Constant(factor=math.nan), "factor must be a finite number of at least 1, not nan"),
        (lambda: Constant(extra_seconds=math.inf), "extra_seconds must be a finite number of at least 0, not inf"),
        (lambda: From(first=-1), "first must be a whole number of at least 0, not -1"),
        (lambda: From(first=5, until=5), "until must be greater than first, which is 5, not 5"),
        (lambda: From(first=5, factor=0), "factor must be"),
        (lambda: Episodic(period=0, shortest=0, longest=0, seed=0), "period must be a whole number of at least 1"),
        (lambda: Episodic(period=9, shortest=-1, longest=3, seed=0), "shortest must be a whole number of at least 0"),
        (lambda: Episodic(period=9, shortest=4, longest=3, seed=0), "between shortest, which is 4, and period"),
        (lambda: Episodic(period=9, shortest=4, longest=10, seed=0), "period, which is 9, not 10"),
        (
            lambda: Episodic(period=9, shortest=4, longest=5, seed=2**64),
            "seed must be a whole number of at most 18446744073709551615",
        ),
        (lambda: Jitter(spread=-0.1, seed=0), "spread must be a finite number of at least 0, not -0.1"),
        (lambda: Jitter(spread=0.1, seed=-1), "seed must be a whole number of at least 0, not -1"),
        (lambda: Trace(factors=()), "factors must hold at least one number"),
        (lambda: Trace(factors=(1, 0)), "factors[1] must be a finite number greater than 0, not 0"),
        (lambda: Device(curve=LINE, largest_batch=0), "largest_batch must be a whole number of at least 1, not 0"),
    ],
)
def test_values_out_of_range_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert message in str(raised.value)
