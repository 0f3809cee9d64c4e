"""How time is shared out over stretches, and how many values become few."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.made_log import events_of
from support.records import run_from

from evenstep.report.stretches import binned, shares

durations = st.lists(st.floats(0.0, 0.1), min_size=3, max_size=3).map(tuple)


@given(parts=st.lists(durations, min_size=1, max_size=4), stretches=st.integers(1, 50))
def test_no_second_of_any_part_is_lost_or_counted_twice(parts, stretches):
    run = run_from(events_of(parts))
    edges = np.linspace(0.0, run.seconds, stretches + 1)
    for done in run.iterations.values():
        found = shares(done, edges)
        for part, seconds in done.parts.items():
            assert (found[part] * np.diff(edges)).sum() == pytest.approx(seconds.sum(), abs=1e-6)
        assert np.sum(list(found.values()), axis=0).max() <= 1 + 1e-6


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200),
    most=st.integers(1, 50),
)
def test_bins_keep_the_mean_and_the_extremes(values, most):
    y = np.array(values)
    bins = binned(np.arange(len(y), dtype=np.float64), y, most)
    assert len(bins.x) <= max(most, 0) or len(y) <= most
    assert bins.least.min() == y.min()
    assert bins.largest.max() == y.max()
    slack = 1e-9 * np.abs(y).max()
    assert (bins.least <= bins.mean + slack).all()
    assert (bins.mean <= bins.largest + slack).all()
    assert (np.diff(bins.x) > 0).all()


def test_values_that_are_none_are_left_out_and_weights_heeded():
    y = np.array([1.0, np.nan, 3.0, 5.0])
    assert binned(np.arange(4.0), y, 10).mean.tolist() == [1.0, 3.0, 5.0]
    weighted = binned(np.arange(4.0), np.array([1.0, 1.0, 3.0, 5.0]), 1, weights=np.array([3.0, 0.0, 0.0, 1.0]))
    assert weighted.mean.tolist() == [2.0]


def test_clocks_of_two_hosts_are_brought_together():
    events = events_of([(0.0, 0.01, 0.0)] * 2)
    for event in events:
        if event["worker"] == 1:  # Its host was started later, so its clock shows less.
            event |= {key: event[key] - 70.0 for key in ("at",) if key in event}
    run = run_from(events)
    assert run.iterations[1].began.tolist() == pytest.approx(run.iterations[0].began.tolist())
    assert run.since_begin(131.0, 1) == pytest.approx(101.0)
