import io
import re
from dataclasses import replace

import pytest
from rich.console import Console
from support.records import run_from

from evenstep.report.summary import summary_of
from evenstep.report.terminal import COMPUTE, REST, WAIT, comparison_table, iteration_bars, lines_of

EQUAL, BALANCED = (12, 12, 12), (16, 16, 4)


@pytest.fixture
def summaries(events_of):
    return [summary_of(run_from(events_of(*run))) for run in (("bsp", EQUAL), ("lb-bsp", EQUAL, BALANCED))]


def text_of(renderable):
    console = Console(width=100, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def rows_without_name(table):
    return [line.split() for line in text_of(table).splitlines() if not line[:20].strip()]


def test_the_table_compares_with_the_first_run(summaries):
    lines = [re.split("  +", line.strip(), maxsplit=1) for line in text_of(comparison_table(summaries)).splitlines()]
    rows = {name: values[0].split() for name, *values in lines if values}
    assert ["bsp", "lb-bsp"] in rows_without_name(comparison_table(summaries))
    assert rows["final batch sizes"] == ["12", "12", "12", "16", "16", "4"]
    assert rows["waiting per worker"] == ["61%", "61%", "0%", "11%", "11%", "0%"]
    speed_up = summaries[1].samples_per_second / summaries[0].samples_per_second
    assert rows["speed-up"] == ["1.00x", f"{speed_up:.2f}x"]


def test_a_single_run_has_no_speed_up(summaries):
    assert "speed-up" not in text_of(comparison_table(summaries[:1]))


def test_further_rows_stand_in_the_table(summaries):
    assert "97.5%" in text_of(comparison_table(summaries, further=[("test accuracy", ["97.0%", "97.5%"])]))


def test_bars_show_compute_and_waiting_on_one_scale(summaries):
    lines = text_of(iteration_bars(summaries)).splitlines()
    bars = [line for line in lines if line.startswith("  worker")]
    length = [sum(bar.count(character) for character in (COMPUTE, WAIT, REST)) for bar in bars]
    assert length[:3] == [54, 54, 54]
    share = summaries[1].iteration_seconds / summaries[0].iteration_seconds
    assert length[3:] == [round(54 * share)] * 3
    waiting = [bar.count(WAIT) for bar in bars]
    assert waiting[0] == pytest.approx(54 * summaries[0].workers[0].waiting_share, abs=1)
    assert waiting[2] == 0
    assert bars[5].endswith("4 samples")
    assert "compute" in lines[-1]


def test_a_bar_ends_with_the_iteration_whatever_computing_is_said_to_take(summaries):
    run = summaries[0]
    workers = tuple(replace(each, compute_seconds=1e6) for each in run.workers)
    bars = text_of(iteration_bars([replace(run, workers=workers)])).splitlines()
    assert all(line.count(COMPUTE) == 54 for line in bars if line.startswith("  worker"))


def test_bars_as_lines_have_colours_for_a_terminal_only(summaries):
    plain, coloured = (lines_of(iteration_bars(summaries), colours=colours) for colours in (False, True))
    assert next(len(line) for line in plain if COMPUTE in line and line.startswith("  worker")) <= 84
    assert not any("\x1b" in line for line in plain)
    assert any("\x1b[34m" in line for line in coloured)
    assert [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in coloured] == plain
