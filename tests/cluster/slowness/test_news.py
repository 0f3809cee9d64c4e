"""What is told of slowness: that it begins, changes and ends, and nothing of jitter."""

from itertools import pairwise

import pytest

from evenstep.cluster.slowness import (
    NO_SLOWNESS,
    AffineCurve,
    Chain,
    Constant,
    Device,
    Episodic,
    From,
    Jitter,
    PerWorker,
    Slowness,
    SlownessNews,
    Trace,
)

DEVICE = Device(curve=AffineCurve(seconds_per_sample=0.001))


def told(disturbance, iterations=40, worker=0):
    news = SlownessNews(disturbance, worker)
    each = ((iteration, news.of(iteration)) for iteration in range(iterations))
    return {iteration: slowness for iteration, slowness in each if slowness is not None}


@pytest.mark.parametrize(
    ("disturbance", "expected"),
    [
        (Chain(), {}),
        (Jitter(spread=0.5, seed=1), {}),
        (DEVICE, {}),
        (Constant(worker=1), {}),
        (Constant(worker=0, extra_seconds=0.5), {0: Slowness(factor=4.0, extra_seconds=0.5)}),
        (From(factor=3, first=5, until=9), {5: Slowness(factor=3), 9: NO_SLOWNESS}),
        (From(factor=3, first=5), {5: Slowness(factor=3)}),
        # Over before it has lasted.
        (From(factor=3, first=5, until=7), {}),
        (Trace(factors=(1.0, 4.0)), {}),
        (Trace(factors=(1.0,) * 10 + (4.0, 4.1, 3.9) * 10), {10: Slowness(factor=4.0)}),
        (
            Chain(parts=(DEVICE, Jitter(spread=0.2, seed=1), From(factor=2, first=3), From(factor=3, first=7))),
            {3: Slowness(factor=2), 7: Slowness(factor=6)},
        ),
        # What comes before a device is replaced by it, as its seconds are.
        (Chain(parts=(Constant(), DEVICE)), {}),
        (
            Chain(parts=(Constant(factor=1, extra_seconds=0.1), Constant(factor=2))),
            {0: Slowness(factor=2, extra_seconds=0.2)},
        ),
        (PerWorker(parts_by_worker=(Constant(factor=2), Chain())), {0: Slowness(factor=2)}),
    ],
)
def test_what_is_told_of_worker_0(disturbance, expected):
    assert told(disturbance) == expected


def test_episodes_are_told_at_their_edges():
    spells = Episodic(factor=3, period=40, shortest=5, longest=8, seed=4)
    episodes = [spells.episode(worker=2, number=number) for number in range(3)]
    assert all(after.start - before.stop >= 3 for before, after in pairwise(episodes))
    edges = {edge for episode in episodes for edge in (episode.start, episode.stop)}
    assert set(told(spells, iterations=120, worker=2)) == edges - {120}


def test_slowness_is_compared_with_what_was_told_and_not_with_the_iteration_before():
    creeping = Trace(factors=tuple(1.0 + 0.01 * iteration for iteration in range(100)))
    changes = told(creeping, iterations=90)
    assert 5 <= len(changes) <= 20
    factors = [1.0, *(each.factor for each in changes.values())]
    assert all(after > 1.05 * before for before, after in pairwise(factors))
