"""The page in a real browser: complete, quiet, self-contained, and with the numbers of the log."""

import json
import re
from base64 import b64decode
from itertools import pairwise

import numpy as np
import pytest
from markupsafe import escape
from support.browser import Browser
from support.made_log import write_log

from evenstep.cli.main import main
from evenstep.report.overview import overview_of
from evenstep.report.page import page_html
from evenstep.report.page.time_plots import side_by_side_plot
from evenstep.report.recorded import read_run

pytestmark = pytest.mark.xdist_group("page")

FAST, SLOW = (0.001, 0.020, 0.001), (0.001, 0.080, 0.001)
SIZES = [(12, 12, 12)] * 6 + [(16, 16, 4)] * 500


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two runs and the page on them."""
    folder = tmp_path_factory.mktemp("page")
    write_log(folder / "equal", (FAST, FAST, SLOW), notes=True, sizes=[(10, 10, 10)] * 20)
    plans = [(0, SIZES[0]), (6, SIZES[6])]
    write_log(folder / "b<a>lanced", (FAST, FAST, FAST), scheme="lb-bsp", sizes=SIZES, plans=plans, notes=True)
    path = folder / "report.html"
    assert main(["report", str(folder / "equal"), str(folder / "b<a>lanced"), "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def browser():
    chromium = Browser()
    yield chromium
    chromium.close()


@pytest.fixture(scope="module")
def desktop(page, browser):
    """The page, opened once for all tests that only look at it or put it back."""
    browser.open(page)
    return browser


def test_its_numbers_are_those_of_the_log(page, desktop):
    tables = desktop.evaluate(
        "[...document.querySelectorAll('section')].map(each => [...each.querySelectorAll('table')].map(table =>"
        " [...table.querySelectorAll('tbody tr')].map(row => [...row.children].map(cell => cell.textContent))))"
    )
    overviews = [overview_of(name, read_run(page.parent / name)) for name in ("equal", "b<a>lanced")]
    rows = tables[0][0]
    for row, overview in zip(rows, overviews, strict=True):
        assert row[:2] == [overview.name, f"{overview.summary.samples_per_second:,.0f}"]
        assert row[3:6] == [
            str(overview.summary.over_equal_sizes or ""),
            f"{overview.summary.of_ideal:.0%}",
            f"{overview.summary.waiting_share:.0%}",
        ]
    faster = overviews[1].summary.samples_per_second / overviews[0].summary.samples_per_second
    assert rows[1][2] == f"{faster:.2f}x"
    (conclusion,) = desktop.evaluate("[...document.querySelectorAll('.conclusion')].map(each => each.textContent)")
    assert conclusion == f"b<a>lanced trained {faster:.2f} times as fast as equal."
    verdicts = desktop.evaluate("[...document.querySelectorAll('.verdict')].map(each => each.textContent)")
    assert verdicts == [overview.summary.verdict.text for overview in overviews]
    parts, workers = tables[1][:2]
    assert [row[-1] for row in parts] == [f"{each.parts['waiting']:.1%}" for each in overviews[0].summary.workers]
    assert [row[4] for row in workers] == [f"{each.samples:,}" for each in overviews[0].summary.workers]
    # The traces too: the sizes of the last worker, as plotly draws them.
    drawn = desktop.evaluate("Array.from(document.getElementById('sizes-b<a>lanced')._fullData[2].y)")
    assert drawn == [sizes[2] for sizes in SIZES]


def test_the_page_of_a_single_run_begins_with_its_verdict(tmp_path):
    write_log(tmp_path, (FAST, FAST, SLOW))
    overview = overview_of("run", read_run(tmp_path))
    text = page_html([overview], version="0")
    verdict = escape(overview.summary.verdict.text)
    assert text.count(verdict) == 1
    assert text.index(verdict) < text.index("<main")


def test_its_head_says_when_where_and_what_ran_and_the_slow_worker_is_marked(tmp_path):
    write_log(tmp_path, (FAST, FAST, SLOW), sizes=[(10, 10, 10)] * 60)
    for path in tmp_path.glob("worker-*.jsonl"):
        more = '"schema":3,"command":"train.py --lr <b>","commit":"0123456789ab","host":"one","version":"0.2.0",'
        path.write_text(path.read_text().replace('"schema":2,', more, 1))
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    html = (tmp_path / "page.html").read_text()
    about = (
        "1970-01-01 01:23 UTC",
        "train.py --lr &lt;b&gt;",
        "commit 0123456789ab",
        "3 x CPU on one",
        "evenstep 0.2.0",
    )
    assert ' <span class="about">' + " \N{MIDDLE DOT} ".join(about) + "</span>" in html
    assert re.findall(r'<tr class="slow">\s*<th scope="row">(.*?)</th>', html)[0] == "2 (slow)"
    # The end of the verdict on equal sizes.
    assert re.search(rf"Use lb-bsp: up to \+\d+ % over plain DDP\.\nNext: evenstep plan {tmp_path} ", html)


def test_runs_side_by_side_are_shown_in_the_midst_of_an_epoch(page):
    overviews = [overview_of(name, read_run(page.parent / name)) for name in ("equal", "b<a>lanced")]
    shown = {}
    for row in side_by_side_plot(overviews).table.rows:
        shown.setdefault(row["worker"].split()[0], set()).add(int(row["iteration"]))
    for numbers in shown.values():
        _, *whole, _ = sorted(numbers)  # The first and the last may only touch the window.
        assert len({number // 6 for number in whole}) == 1
        assert not any(number % 6 == 5 for number in whole)


def test_large_numbers_are_written_out(tmp_path):
    write_log(tmp_path, ((0.001, 0.0001, 0.001),) * 2, sizes=[(32, 32)] * 20)
    text = page_html([overview_of("run", read_run(tmp_path))], version="0")
    speeds = text[text.index("Speeds: the mean samples/s") :]
    assert "<td>320,000</td>" in speeds
    assert not re.search(r"<td>[0-9.]+e", speeds)


def test_the_last_short_slice_of_an_epoch_is_not_among_the_batch_sizes(tmp_path):
    epoch = [(12, 12, 12)] * 5 + [(3, 3, 3)]
    write_log(tmp_path, (FAST, FAST, SLOW), sizes=epoch * 2)
    text = page_html([overview_of("run", read_run(tmp_path))], version="0")
    plots = json.loads(re.search(r'id="plots">(.*?)</script>', text, re.DOTALL)[1])
    drawn = [np.frombuffer(b64decode(trace["y"]["bdata"]), "<f4") for trace in plots["sizes-run"]["traces"]]
    assert [each.tolist() for each in drawn] == [[12.0] * 10] * 3


def test_on_paper_the_numbers_of_the_plots_are_open(desktop):
    closed = "document.querySelectorAll('details:not([open])').length"
    before = desktop.evaluate(closed)
    assert before > 0
    desktop.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert desktop.evaluate(closed) == 0
    desktop.evaluate("dispatchEvent(new Event('afterprint'))")
    assert desktop.evaluate(closed) == before
    assert desktop.console == []


def test_zooming_in_shows_more_and_works_by_keyboard(desktop):
    lanes = "document.getElementById('lanes-b<a>lanced')"
    width = f"({lanes}.layout.xaxis.range[1] - {lanes}.layout.xaxis.range[0])"
    whole = desktop.evaluate(width)
    # More stretches of the time than a screen shows, so that zooming in shows more.
    assert desktop.evaluate(f"{lanes}._fullData[1].x.length") > 1280
    desktop.evaluate(f"{lanes}.focus()")
    for _ in range(3):
        desktop.press("+")
    desktop.wait_for(f"{width} < {whole / 7}")
    desktop.press("0")
    desktop.wait_for(f"Math.abs({width} - {whole}) < 0.1 * {whole}")
    assert desktop.console == []


def test_another_stretch_can_be_chosen(desktop):
    chosen = "document.querySelector('[data-plot=\"close-equal\"]')"
    shown = "document.getElementById('close-equal')"
    names = desktop.evaluate(f"[...{chosen}.options].map(each => each.text)")
    assert names == ["an ordinary stretch", "the beginning", "the longest iteration", "the end"]
    assert desktop.evaluate(f"{shown}.layout.xaxis.range[0]") > 0.5
    desktop.evaluate(f"{chosen}.selectedIndex = 1, {chosen}.dispatchEvent(new Event('change'))")
    desktop.wait_for(f"{shown}.layout.xaxis.range[0] < 0.01")
    assert desktop.evaluate(f"{shown}._fullData[0].base.some(each => each < 0.01)")


VIEWS = {"desktop": {}, "dark": {"dark": True}, "phone": {"width": 390, "height": 800, "phone": True}}


@pytest.mark.parametrize("view", VIEWS)
def test_the_page_is_complete_and_quiet_everywhere(view, page, desktop):
    browser = desktop
    if view != "desktop":
        browser.open(page, **VIEWS[view])
    assert browser.console == []
    assert browser.requests == [page.as_uri()]
    assert browser.evaluate("document.querySelectorAll('.plot').length") == 1 + 2 + 2 * 4
    assert browser.evaluate("[...document.querySelectorAll('.plot')].every(each => each.querySelector('.main-svg'))")
    # Nothing sticks out to the side.
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    ground = "rgb(13, 17, 23)" if view == "dark" else "rgb(255, 255, 255)"
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == ground


def test_every_plot_has_a_name_and_a_table_and_headings_are_in_order(page):
    text = page.read_text()
    body = text[text.index("<body>") : text.index('<script type="application/json"')]
    assert "<a>" not in body
    figures = re.findall(r"<figure>.*?</figure>", body, re.DOTALL)
    assert len(figures) == 11
    for figure in figures:
        assert re.search(r'role="img" tabindex="0" aria-label="[^"]{20,}"', figure)
        assert "<caption>" in figure
        assert 'scope="row"' in figure
    levels = [int(level) for level in re.findall(r"<h([1-6])", body)]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert '<html lang="en">' in text


def test_runs_that_are_named_by_their_folders_say_what_scheme_they_are_of(page):
    text = page.read_text()
    assert '<h2 id="run-1">b&lt;a&gt;lanced: lb-bsp</h2>' in text
    assert '<td class="words">lb-bsp</td>' in text


def test_the_page_cannot_load_anything(page):
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page.read_text()).group(1)
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_json_has_the_numbers_for_machines(page, capsys):
    assert main(["report", str(page.parent / "equal"), "--json"]) == 0
    (values,) = json.loads(capsys.readouterr().out)
    assert values["verdict"]["worker"] == 2
    assert values["verdict"]["cause"] == "compute"
    assert values["samples_per_second"] == pytest.approx(30 / 0.087)
    assert values["noted"]["loss"] == {"last": pytest.approx(1 / 20), "count": 20}


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ("", "the following arguments are required: RUN_DIR"),
        ("nowhere", "there is no folder nowhere"),
        ("HERE/equal -o HERE/none/report.html", "cannot be written (No such file or directory): give another"),
        ("HERE/equal HERE/equal", "was named twice"),
    ],
)
def test_mistakes_are_one_sentence(arguments, fragment, page, capsys):
    assert main(["report", *arguments.replace("HERE", str(page.parent)).split()]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("evenstep: ")
    assert fragment in error
