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


@pytest.mark.alone
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


@pytest.mark.alone
def test_the_summary_says_what_the_run_directory_says(tmp_path, capfd):
    assert run("--workers", 2, "--slow", "1=3x", "--run-dir", tmp_path / "run", SCRIPT) == 0
    head, *lines = said(capfd.readouterr().err)
    shown, overview = " ".join(lines), overview_of("run", read_run(tmp_path / "run"))
    verdict = overview.verdict
    numbers = [list(map(float, re.findall(r"\d+(?:\.\d+)?", text))) for text in (shown, verdict.text)]
    assert re.sub(r"\d+(\.\d+)?", "", shown) == re.sub(r"\d+(\.\d+)?", "", verdict.text)
    assert numbers[0] == pytest.approx(numbers[1], rel=0.03, abs=2)
    assert samples_per_second(head) == pytest.approx(overview.summary.samples_per_second, abs=0.51)


def samples_per_second(head):
    return float(re.search(r" trained ([\d,]+) samples/s ", head).group(1).replace(",", ""))


def torchrun(scheme, *words):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    settings = {"scheme": scheme, "slow": ["1=3x"], "servers": []}
    environment = {**os.environ, "EVENSTEP_LAUNCH": json.dumps(settings)}
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=GUARD_SECONDS, env=environment)


@pytest.mark.alone
@pytest.mark.parametrize("scheme", ["lb-bsp", "asp"])
def test_plain_torchrun_has_the_summary_too_and_once(scheme):
    ended = torchrun(scheme)
    assert ended.returncode == 0
    lines = said(ended.stderr)
    assert [line.startswith(f"{scheme} trained ") for line in lines].count(True) == 1
    assert "; batch sizes 12 12" in lines[0]
    assert "orker 1 computes" in lines[1]


@pytest.mark.alone
def test_a_worker_that_died_is_named_once_when_it_did_and_once_at_the_end(tmp_path, capfd):
    assert run("--workers", 3, "--scheme", "asp", "--run-dir", tmp_path / "run", SCRIPT, "dies") == 0
    first, head, *summary = said(capfd.readouterr().err)
    assert first == "worker 1 was killed by SIGKILL; the others go on"
    assert summary[-1] == (
        "worker 1 was killed by SIGKILL, which is what a system out of memory does; the others finished without it"
    )
    assert len(summary) <= 3
    assert not any("orker 1" in line for line in [head, *summary[:-1]])
    overview = overview_of("run", read_run(tmp_path / "run"))
    assert overview.verdict.worker != 1
    assert re.search(r"Worker 1 was lost after [567] iterations \(was killed by SIGKILL\)\.", overview.verdict.text)
    # The servers see what the workers see, but for the way in between.
    assert samples_per_second(head) == pytest.approx(overview.summary.samples_per_second, rel=0.1)


def test_a_worker_that_left_its_loop_before_the_others_is_told_so(tmp_path, capfd):
    assert run("--workers", 3, "--scheme", "asp", "--run-dir", tmp_path / "run", SCRIPT, "leaves") == 0
    text = r"Worker 1 left early, after [567] iterations\."
    assert [bool(re.fullmatch(text, line)) for line in said(capfd.readouterr().err)].count(True) == 1
    assert re.search(text, overview_of("run", read_run(tmp_path / "run")).verdict.text)


@pytest.mark.parametrize(("how", "code"), [("raises", 1), ("exits", 3)])
def test_a_script_that_failed_has_no_summary(how, code, capfd):
    assert run("--workers", 2, SCRIPT, how) == code
    assert not any(" trained " in line for line in said(capfd.readouterr().err))


def test_nor_has_one_that_failed_after_it_had_closed_its_loader():
    ended = torchrun("lb-bsp", "closes")
    assert ended.returncode == 1
    assert "RuntimeError: no more" in ended.stderr
    assert not any(" trained " in line for line in said(ended.stderr))


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
