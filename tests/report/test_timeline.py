import re
from xml.etree import ElementTree

import pytest

from evenstep.core.errors import ConfigError
from evenstep.report.recorded import recorded_run
from evenstep.report.timeline import Panel, timeline_svg
from evenstep.report.window import same_window

EQUAL, BALANCED = (12, 12, 12), (16, 16, 4)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def runs(events_of):
    return [recorded_run(events_of(*run)) for run in (("bsp", EQUAL), ("lb-bsp", EQUAL, BALANCED))]


@pytest.fixture
def picture(runs):
    panels = [Panel(run=run, caption=f"under <{run.scheme}>") for run in runs]
    return timeline_svg(panels, title="Equal & balanced", subtitle="Three workers", iterations=4)


def test_the_window_shows_the_same_full_iterations(runs):
    windows = same_window(runs, 4)
    assert [window.seconds for window in windows] == pytest.approx([4 * 0.058, 4 * 0.026])
    for window, sizes in zip(windows, (EQUAL, BALANCED), strict=True):
        assert [{span.samples for span in spans} for spans in window.lanes.values()] == [{size} for size in sizes]


def test_spans_follow_each_other(runs):
    for window in same_window(runs, 4):
        for spans in window.lanes.values():
            times = [
                time for span in spans for time in (span.compute_began, span.compute_ended, span.wait_ended, span.ended)
            ]
            assert times == sorted(times)


def test_no_window_where_there_are_too_few_iterations(runs):
    assert same_window(runs, 6) is None
    with pytest.raises(ConfigError, match="let them run for longer"):
        timeline_svg([Panel(run=run, caption="") for run in runs], title="", subtitle="", iterations=6)


def test_the_picture_is_self_contained(picture):
    assert not re.search(r"href|<script|import|url\((?!#)|font-face", picture)
    assert picture.count("http") == 1  # the namespace


def test_the_picture_says_what_it_shows(picture):
    texts = [element.text for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    for text in ("Equal & balanced", "under <bsp>", "under <lb-bsp>", "milliseconds", "worker 2", "4x slower"):
        assert text in texts
    assert "2.2x as fast" in texts
    assert texts.count("12") == 4 * 3
    assert texts.count("16") == 4 * 2


def test_each_iteration_of_each_worker_has_a_box(picture):
    kinds = [element.get("class") for element in ElementTree.fromstring(picture).iter(f"{SVG}rect")]
    assert kinds.count("fast") == 2 * 4 * 2 + 1
    assert kinds.count("slow") == 2 * 4 + 1
    assert kinds.count("wait") == 2 * 4 + 1  # the fast two under bsp alone, and the legend's


def test_the_picture_minds_dark_mode(picture):
    assert "prefers-color-scheme: dark" in picture
