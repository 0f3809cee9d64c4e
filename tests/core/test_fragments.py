"""Fragments of a model: which tensors are in each, and when each is averaged."""

import numpy as np
import pytest

from evenstep.core.fragments import cut_into_fragments, due_fragments
from evenstep.core.samples import Share


def due(iteration, period, fragments, ends_epoch=False):
    share = Share(iteration=iteration, positions=(), samples=0, sizes=np.zeros(1, int), ends_epoch=ends_epoch)
    return due_fragments(share, period, fragments)


@pytest.mark.parametrize(("period", "fragments"), [(1, 1), (4, 1), (4, 2), (7, 3), (5, 5), (50, 8)])
def test_each_fragment_meets_once_a_period_alone_and_all_meet_at_the_end_of_an_epoch(period, fragments):
    met = [due(iteration, period, fragments) for iteration in range(3 * period)]
    assert max(map(len, met)) == 1
    assert met[:period] == met[period : 2 * period] == met[2 * period :]
    assert sorted(sum(met[:period], ())) == [*range(fragments)]
    assert met[period - 1] == (0,)
    places = [place for place, each in enumerate(met) if each]
    assert set(np.diff(places)) <= {period // fragments, -(-period // fragments)}
    assert due(0, period, fragments, ends_epoch=True) == (*range(fragments),)


def test_tensors_of_any_sizes_are_cut_into_neighbours_none_of_them_empty():
    random = np.random.default_rng(3)
    for _ in range(300):
        sizes = random.choice([0, 1, 8, 100, 5000], random.integers(1, 12)).tolist()
        count = int(random.integers(1, len(sizes) + 1))
        cut = cut_into_fragments(sizes, count)
        assert sorted(set(cut)) == [*range(count)]
        assert cut == sorted(cut)
    by_fragment = np.bincount(cut_into_fragments([3] * 64, 5), weights=[3] * 64)
    assert by_fragment.max() - by_fragment.min() <= 3
