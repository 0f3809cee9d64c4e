"""What stands on the terminal at the end of a run: how it went, without a run directory too."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.guard import GUARD_SECONDS

from evenstep.cli.main import main
from evenstep.report.overview import overview_of
from evenstep.report.recorded import read_run

pytestmark = pytest.mark.multiprocess

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = SCRIPTS / "trains_some.py"


def run(*words):
    return main(["run", *map(str, words)])


def said(text):
    """Our lines without our name."""
    return [line.removeprefix("evenstep: ") for line in text.splitlines() if line.startswith("evenstep: ")]


def test_a_run_ends_with_its_throughput_its_sizes_and_who_is_slow(capfd):
    assert run("--workers", 2, "--slow", "1=3x", "--json", SCRIPT) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out.splitlines()[-1])["scheme"] == "lb-bsp"
    head, *verdict = said(captured.err)
    assert re.fullmatch(
        r"lb-bsp trained [\d,]+ samples/s for [\d.]+ s on 2 workers; batch sizes 12 12 at first, \d+ \d at the end\.",
        head,
    )
    assert len(verdict) <= 3
    assert re.search(r"[Ww]orker 1 computes [23](\.\d)?x slower", " ".join(verdict))


def test_the_summary_says_what_the_run_directory_says(tmp_path, capfd):
    assert run("--workers", 2, "--slow", "1=3x", "--run-dir", tmp_path / "run", SCRIPT) == 0
    shown = " ".join(said(capfd.readouterr().err)[1:])
    verdict = overview_of("run", read_run(tmp_path / "run")).verdict
    numbers = [list(map(float, re.findall(r"\d+(?:\.\d+)?", text))) for text in (shown, verdict.text)]
    assert re.sub(r"\d+(\.\d+)?", "", shown) == re.sub(r"\d+(\.\d+)?", "", verdict.text)
    assert numbers[0] == pytest.approx(numbers[1], rel=0.03, abs=2)


@pytest.mark.parametrize("scheme", ["lb-bsp", "asp"])
def test_plain_torchrun_has_the_summary_too_and_once(scheme):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    settings = {"scheme": scheme, "slow": ["1=3x"], "servers": []}
    environment = {**os.environ, "EVENSTEP_LAUNCH": json.dumps(settings)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_SECONDS, env=environment, check=True)
    lines = said(ended.stderr)
    assert [line.startswith(f"{scheme} trained ") for line in lines].count(True) == 1
    assert "; batch sizes 12 12" in lines[0]
    assert "orker 1 computes" in lines[1]


def test_a_worker_that_died_is_told_as_lost_in_the_summary_and_in_the_report(tmp_path, capfd):
    assert run("--workers", 3, "--scheme", "asp", "--run-dir", tmp_path / "run", SCRIPT, "dies") == 0
    lines = said(capfd.readouterr().err)
    assert any(line.startswith("worker 1 was killed by SIGKILL") for line in lines)
    assert any(re.fullmatch(r"Worker 1 was lost after [567] iterations \(has ended\)\.", line) for line in lines)
    verdict = overview_of("run", read_run(tmp_path / "run")).verdict
    assert verdict.worker != 1
    assert re.search(r"Worker 1 was lost after [567] iterations \(has ended\)\.", verdict.text)
    assert not any("Worker 1 computes" in line for line in [*lines, verdict.text])


def test_a_script_that_failed_has_no_summary(capfd):
    assert run("--workers", 2, SCRIPT, "raises") == 1
    assert not any(" trained " in line for line in said(capfd.readouterr().err))


def test_a_process_of_its_own_has_no_summary():
    environment = {name: value for name, value in os.environ.items() if name != "EVENSTEP_LAUNCH"}
    ended = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=GUARD_SECONDS, env=environment
    )
    assert (ended.returncode, said(ended.stderr)) == (0, [])


def test_a_script_without_prepare_is_told_so_with_what_had_no_effect(tmp_path, capfd):
    assert run(SCRIPTS / "tells.py", tmp_path) == 0
    assert said(capfd.readouterr().err) == [
        f"{SCRIPTS / 'tells.py'} never called evenstep.prepare, so it ran without evenstep"
    ]
    assert run("--scheme", "asp", "--heartbeat", 5, "--json", SCRIPTS / "tells.py", tmp_path) == 0
    captured = capfd.readouterr()
    assert said(captured.err)[-1].endswith("so it ran without evenstep; --scheme and --heartbeat had no effect")
    assert captured.out.splitlines()[-1] == "null"
