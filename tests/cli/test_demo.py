import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from evenstep.cli import demo_runs
from evenstep.cli.demo_setup import ideal_speed_up, write_digits
from evenstep.cli.main import main
from evenstep.report.recorded import read_run

TRAIN = Path(demo_runs.__file__).with_name("demo_train.py")


def test_the_ideal_is_that_of_the_emulated_speeds():
    # Equal: 26 * 7 ms. In proportion to 4 : 4 : 4 : 1: 32 * 1.75 ms = 8 * 7 ms.
    assert ideal_speed_up() == pytest.approx(26 * 7 / 56)


@pytest.mark.multiprocess
@pytest.mark.timeout(180)  # eight processes import torch
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # torchrun's own log files
def test_a_short_demo_balances_and_draws(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(demo_runs, "EPOCHS", 1)
    folder, picture = tmp_path / "events", tmp_path / "picture.svg"
    assert main(["demo", "--json", "--run-dir", str(folder), "--picture", str(picture)]) == 0
    values = json.loads(capfd.readouterr().out)
    bsp, balanced = values["runs"]
    assert [worker["last_batch_size"] for worker in bsp["workers"]] == [26, 26, 26, 26]
    sizes = [worker["last_batch_size"] for worker in balanced["workers"]]
    assert sum(sizes) == 104
    assert sizes[3] < min(sizes[:3]) / 2
    assert values["speed_up"] == pytest.approx(balanced["samples_per_second"] / bsp["samples_per_second"])
    assert bsp["test_accuracy"] == pytest.approx(balanced["test_accuracy"], abs=0.02)
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")
    assert read_run(folder / "lb-bsp").scheme == "lb-bsp"


@pytest.mark.multiprocess
def test_run_sums_up_as_json(tmp_path, capfd):
    data = tmp_path / "digits.npz"
    write_digits(data)
    words = ["--workers", "1", "--slow", "0=+1ms", "--json", str(TRAIN), "--data", str(data)]
    assert main(["run", *words, "--epochs", "1", "--batch-size", "128"]) == 0
    summary = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert summary["scheme"] == "lb-bsp"
    assert summary["iterations"] == 12
    assert [worker["samples"] for worker in summary["workers"]] == [1437]
