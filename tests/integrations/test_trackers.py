"""Trackers get the points of curves."""

import pytest
from support.made_log import write_log

from evenstep.telemetry import read_events
from evenstep.telemetry.sinks import Points

PARTS = ((0.001, 0.020, 0.001), (0.001, 0.080, 0.001))


@pytest.fixture
def run_dir(tmp_path):
    return write_log(tmp_path / "run", PARTS, notes=True)


def test_the_points_of_a_run_are_the_curves_of_its_workers(run_dir):
    points = Points()
    found = [point for event in read_events(run_dir) if (point := points.of(event)) is not None]
    slow = [each for each in found if each.worker == 1 and "compute_seconds" in each.values]
    assert [each.iteration for each in slow] == list(range(12))
    assert [each.values["compute_seconds"] for each in slow] == pytest.approx([0.08] * 12)
    assert any("noted/loss" in each.values for each in found)
