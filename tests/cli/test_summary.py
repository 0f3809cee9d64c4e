"""What stands on the terminal at the end of a run: how it went, without a run directory too."""

import json
import re
from pathlib import Path

import pytest
from support.started import Started, script, torchrun

from evenstep.cli.main import main
from evenstep.report.overview import overview_of
from evenstep.report.recorded import read_run

pytestmark = pytest.mark.multiprocess

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = SCRIPTS / "trains_some.py"


def run(*words):
    return main(["run", *map(str, words)])


def said(text):
    """Our lines without our name, and without the picture below them."""
    lines = [line.removeprefix("evenstep: ") for line in text.splitlines() if line.startswith("evenstep: ")]
    return [line for line in lines if not line.startswith("  ") and "   average iteration " not in line]


@pytest.mark.alone
def test_a_run_ends_with_its_throughput_its_sizes_and_who_is_slow_as_its_directory_says(tmp_path, capfd):
    assert run("--workers", 2, "--slow", "1=3x", "--json", "--run-dir", tmp_path / "run", SCRIPT) == 0
    captured = capfd.readouterr()
    summary = json.loads(captured.out.splitlines()[-1])
    assert summary["scheme"] == "lb-bsp"
    assert summary["iterations"] == 40
    assert sum(worker["samples"] for worker in summary["workers"]) == 960
    head, *verdict = said(captured.err)
    assert re.fullmatch(
        r"lb-bsp trained [\d,]+ samples/s for [\d.]+ s on 2 workers; batch sizes 12 12 at first, \d+ \d at the end\.",
        head,
    )
    assert len(verdict) <= 3
    assert [bool(re.search(r"  worker [01] .*█.*  \d+ samples?$", line)) for line in captured.err.splitlines()].count(
        True
    ) == 2
    assert re.search(r"[Ww]orker 1 computes [23](\.\d)?x slower", " ".join(verdict))
    shown, overview = " ".join(verdict), overview_of("run", read_run(tmp_path / "run"))
    told = overview.summary.verdict.text
    numbers = [list(map(float, re.findall(r"\d+(?:\.\d+)?", text))) for text in (shown, told)]
    assert re.sub(r"\d+(\.\d+)?", "", shown) == re.sub(r"\d+(\.\d+)?", "", told)
    assert numbers[0] == pytest.approx(numbers[1], rel=0.03, abs=2)
    # The line is a whole number, and of the workers' own clocks.
    assert samples_per_second(head) == pytest.approx(overview.summary.samples_per_second, rel=0.01, abs=1)


def samples_per_second(head):
    return float(re.search(r" trained ([\d,]+) samples/s ", head).group(1).replace(",", ""))


def run_torchrun(scheme, *words):
    """The exit code of torchrun, and what was written to standard error."""
    words = ("--standalone", "--nproc-per-node", 2, SCRIPT, *words)
    with Started(torchrun, *words, environment={"EVENSTEP_SCHEME": scheme, "EVENSTEP_SLOW": "1=3x"}) as launcher:
        _, error = launcher.communicate()
    return launcher.returncode, error


@pytest.mark.alone
def test_a_run_with_equal_sizes_ends_with_what_balancing_would_gain_and_what_to_type_for_it():
    code, error = run_torchrun("bsp")
    assert code == 0
    gain = r"Use lb-bsp: (up to )?\+\d+ % over plain DDP. Next: the same command with EVENSTEP_SCHEME=lb-bsp."
    assert re.fullmatch(gain, said(error)[-1])


@pytest.mark.alone
@pytest.mark.parametrize("scheme", ["lb-bsp", "asp"])
def test_plain_torchrun_takes_the_scheme_from_the_environment_and_has_one_summary(scheme):
    code, error = run_torchrun(scheme)
    assert code == 0
    lines = said(error)
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
    assert overview.summary.verdict.worker != 1
    assert re.search(
        r"Worker 1 was lost after [567] iterations \(was killed by SIGKILL\)\.", overview.summary.verdict.text
    )
    # The servers see what the workers see, but for the way in between.
    assert samples_per_second(head) == pytest.approx(overview.summary.samples_per_second, rel=0.1)


def test_a_worker_that_left_its_loop_before_the_others_is_told_so(tmp_path, capfd):
    assert run("--workers", 3, "--scheme", "asp", "--run-dir", tmp_path / "run", SCRIPT, "leaves") == 0
    text = r"Worker 1 left early, after [567] iterations\."
    assert [bool(re.fullmatch(text, line)) for line in said(capfd.readouterr().err)].count(True) == 1
    assert re.search(text, overview_of("run", read_run(tmp_path / "run")).summary.verdict.text)


@pytest.mark.parametrize(("workers", "how", "code"), [(2, "raises", 1), (1, "exits", 3)])
def test_a_script_that_failed_has_no_summary(workers, how, code, capfd):
    assert run("--workers", workers, SCRIPT, how) == code
    assert not any(" trained " in line for line in said(capfd.readouterr().err))


def test_nor_has_one_that_failed_after_it_had_closed_its_loader():
    code, error = run_torchrun("lb-bsp", "closes")
    assert code == 1
    assert "RuntimeError: no more" in error
    assert not any(" trained " in line for line in said(error))


def test_a_process_of_its_own_has_no_summary():
    with Started(script, SCRIPT) as process:
        _, error = process.communicate()
    assert (process.returncode, said(error)) == (0, [])


def test_a_script_without_prepare_is_told_so_with_what_had_no_effect(tmp_path, capfd):
    assert run(SCRIPTS / "tells.py", tmp_path) == 0
    assert said(capfd.readouterr().err) == [
        f"{SCRIPTS / 'tells.py'} never called evenstep.prepare, so it ran without evenstep"
    ]
    assert run("--scheme", "asp", "--heartbeat", 5, "--json", SCRIPTS / "tells.py", tmp_path) == 0
    captured = capfd.readouterr()
    assert said(captured.err)[-1].endswith("so it ran without evenstep; --scheme and --heartbeat had no effect")
    assert captured.out.splitlines()[-1] == "null"
