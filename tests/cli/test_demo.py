import json

import pytest
from support.records import check_records

from evenstep.cli import demo
from evenstep.cli.demonstration.setting import IDEAL_SPEED_UP
from evenstep.cli.main import main
from evenstep.report.recorded import read_run
from evenstep.report.timeline import notes_of


def test_the_ideal_is_that_of_the_emulated_speeds():
    # Equal: 26 * 7 ms. In proportion to 4 : 4 : 4 : 1: 32 * 1.75 ms = 8 * 7 ms.
    assert pytest.approx(26 * 7 / 56) == IDEAL_SPEED_UP


@pytest.mark.multiprocess
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # torchrun's own log files
def test_a_short_demo_compares_with_one_start_of_the_workers_and_reports(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(demo, "EPOCHS", 1)
    folder, page = tmp_path / "events", tmp_path / "page.html"
    assert main(["demo", "--json", "--run-dir", str(folder), "--report", str(page)]) == 0
    output = capfd.readouterr()
    values = json.loads(output.out)
    bsp, balanced, dssp = values["runs"]
    assert [worker["last_batch_size"] for worker in bsp["workers"]] == [26, 26, 26, 26]
    sizes = [worker["last_batch_size"] for worker in balanced["workers"]]
    assert sum(sizes) == 104
    assert sizes[3] < min(sizes[:3]) / 2
    assert balanced["speed_up"] == pytest.approx(balanced["samples_per_second"] / bsp["samples_per_second"])
    assert values["speed_up"] == max(run["speed_up"] for run in values["runs"])
    assert bsp["test_accuracy"] == pytest.approx(balanced["test_accuracy"], abs=0.02)
    assert dssp["served"]["samples_committed"] == 1437
    runs = [read_run(folder / name) for name in ("bsp", "lb-bsp", "dssp")]
    assert all({"run", "plan", "iteration", "note", "end"} <= check_records(folder / run) for run in ("bsp", "dssp"))
    assert [run.scheme.partition(":")[0] for run in runs] == ["bsp", "lb-bsp", "dssp"]
    # One start: the same processes noted their losses in all three runs.
    assert len(list((folder / "output").iterdir())) == 1
    assert all(len(notes_of(run, "loss")) >= 4 * 14 for run in runs[:2])
    assert f"The report is in {page}" in output.err
    assert notes_of(runs[0], "accuracy")[0][1] == pytest.approx(bsp["test_accuracy"])
    assert "Accuracy against time" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ("--schemes bps", "there is no scheme 'bps'"),
        ("--schemes bsp bsp", "stands twice"),
        ("--report nowhere/page.html", "cannot be written (No such file or directory): give another"),
    ],
)
def test_mistakes_are_one_sentence_before_anything_starts(arguments, fragment, capsys):
    assert main(["demo", *arguments.split()]) == 2
    assert fragment in capsys.readouterr().err
