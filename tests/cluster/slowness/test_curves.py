"""The devices' curves: seconds as a function of the batch size."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.cluster.slowness import MEASURED_CURVES, AffineCurve, PointCurve
from evenstep.core.errors import ConfigError


def test_affine_is_flat_up_to_its_flat_size_and_then_a_line() -> None:
    curve = AffineCurve(fixed_seconds=1.0, seconds_per_sample=0.5, flat_size=8)
    assert [curve.seconds(size) for size in (0, 1, 8, 9, 16)] == [5.0, 5.0, 5.0, 5.5, 9.0]


def test_the_measured_curves_are_those_of_the_source() -> None:
    assert list(MEASURED_CURVES) == ["gtx1070-a", "gtx1070-b", "tesla-m40", "gtx750"]
    for curve in MEASURED_CURVES.values():
        assert [size for size, _ in curve] == list(range(2, 130))
    assert MEASURED_CURVES["gtx1070-a"][0] == (2, 8.5823)
    assert MEASURED_CURVES["gtx1070-b"][-1] == (129, 104.7019)
    assert MEASURED_CURVES["tesla-m40"][30] == (32, 31.4697)
    assert MEASURED_CURVES["gtx750"][-1] == (129, 594.8122)


@pytest.mark.parametrize("name", MEASURED_CURVES)
def test_a_measured_curve_passes_through_its_points_and_holds_below_them(name: str) -> None:
    curve = PointCurve.measured(name)
    for size, milliseconds in MEASURED_CURVES[name]:
        assert curve.seconds(size) == milliseconds / 1000
    assert curve.seconds(0) == curve.seconds(1) == curve.seconds(2)


@pytest.mark.parametrize("name", MEASURED_CURVES)
@pytest.mark.parametrize("fit_from", [2, 16, 64])
def test_beyond_the_last_point_the_line_of_least_squares_goes_on(name: str, fit_from: int) -> None:
    points = np.array([point for point in MEASURED_CURVES[name] if point[0] >= fit_from])
    line = np.polynomial.Polynomial.fit(points[:, 0], points[:, 1] / 1000, 1)
    curve = PointCurve.measured(name, fit_from=fit_from)
    for size in (130, 169, 1024):
        assert curve.seconds(size) == pytest.approx(line(size), rel=1e-9)


def test_the_old_device_is_about_six_times_slower_where_it_is_full() -> None:
    fast, old = (PointCurve.measured(name).seconds(256) for name in ("gtx1070-a", "gtx750"))
    assert 5 < old / fast < 7


def test_the_line_goes_through_the_last_two_points_where_no_more_are_large_enough() -> None:
    curve = PointCurve(points=((1, 9.0), (2, 1.0), (4, 2.0)), fit_from=16)
    assert curve.seconds(8) == pytest.approx(4.0)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(
    points=st.dictionaries(st.integers(1, 500), st.floats(1e-6, 1e3), min_size=2, max_size=8),
    size=st.integers(0, 500),
)
def test_between_points_the_time_lies_between_theirs(points: dict[int, float], size: int) -> None:
    pairs = tuple(sorted(points.items()))
    # Two far points keep the line rising, whatever the drawn points do.
    curve = PointCurve(points=(*pairs, (1000, 2e3), (2000, 4e3)), fit_from=1000)
    seconds = curve.seconds(size)
    below = [t for x, t in curve.points if x <= size][-1:] or [pairs[0][1]]
    above = next(t for x, t in curve.points if x >= size)
    assert min(below[0], above) * (1 - 1e-9) <= seconds <= max(below[0], above) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AffineCurve(seconds_per_sample=-1.0), "seconds_per_sample must be a finite number of at least 0"),
        (lambda: AffineCurve(fixed_seconds=-1.0, seconds_per_sample=1.0), "fixed_seconds must be"),
        (lambda: AffineCurve(seconds_per_sample=1.0, flat_size=-1), "flat_size must be"),
        (lambda: AffineCurve(seconds_per_sample=0.0), "must not both be 0"),
        (lambda: PointCurve(points=((2, 1.0),)), "points must hold at least two points, not 1"),
        (lambda: PointCurve(points=((0, 1.0), (1, 2.0))), "points[0][0] must be a whole number of at least 1, not 0"),
        (lambda: PointCurve(points=((1, 0.0), (2, 2.0))), "points[0][1] must be a finite number greater than 0"),
        (lambda: PointCurve(points=((1, math.nan), (2, 2.0))), "points[0][1] must be"),
        (lambda: PointCurve(points=((2, 1.0), (2, 2.0))), "rising order of batch size, not 2 after 2"),
        (lambda: PointCurve(points=((16, 2.0), (32, 1.0))), "from batch size 16 up take less time the larger"),
        (lambda: PointCurve.measured("gtx570"), "no measured curve is called 'gtx570'; did you mean 'gtx750'?"),
    ],
)
def test_a_curve_that_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert message in str(raised.value)
