import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from evenstep.cli.main import main
from evenstep.telemetry import read_events

pytestmark = pytest.mark.multiprocess

SCRIPTS = Path(__file__).parent / "scripts"
CLUSTER = '[devices.old]\nper_sample = "1 ms"\n[[workers]]\ndevice = "old"\ncount = 2\n'


def run(*words):
    return main(["run", *map(str, words)])


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGTERM"])
def test_a_killed_worker_is_named_with_its_signal(name, capfd):
    assert run("--workers", 3, SCRIPTS / "ends.py", 1, name) == 128 + getattr(signal, name)
    error = capfd.readouterr().err
    assert error.startswith(f"evenstep: worker 1 was killed by {name}")
    assert error.count("\n") == 1


def test_a_worker_that_exits_is_named_with_its_code(capfd):
    assert run("--workers", 3, SCRIPTS / "ends.py", 2, 3) == 3
    assert capfd.readouterr().err.startswith("evenstep: worker 2 ended with exit code 3: ")


def test_an_error_of_evensteps_is_repeated(capfd):
    assert run("--workers", 2, SCRIPTS / "raises.py") == 1
    error = capfd.readouterr().err
    assert error.splitlines()[-1] == "evenstep: worker 1 ended with exit code 1: the batch is too small: raise it"
    assert "ConfigError: the batch is too small: raise it" in error  # in the worker's own traceback
    assert "ChildFailedError" not in error


def test_the_workers_get_the_options_and_the_script_its_arguments(tmp_path, monkeypatch, capfd):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    monkeypatch.chdir(tmp_path)
    options = ["--scheme", "bsp", "--slow", "1=4x", "--slow", "0=+1ms", "--emulate", "cluster.toml", "--run-dir", "out"]
    assert run("--workers", 2, *options, "--", SCRIPTS / "tells.py", tmp_path, "--workers", 7, "--json", "x") == 0
    told = [json.loads((tmp_path / f"{worker}.json").read_text()) for worker in range(2)]
    for worker, each in enumerate(told):
        assert each["RANK"] == str(worker)
        assert each["WORLD_SIZE"] == "2"
        assert each["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
        assert each["arguments"] == ["--workers", "7", "--json", "x"]
        assert json.loads(each["EVENSTEP_LAUNCH"]) == {
            "scheme": "bsp",
            "slow": ["1=4x", "0=+1ms"],
            "emulate": str(tmp_path / "cluster.toml"),
            "run_dir": str(tmp_path / "out"),
        }
    assert told[0]["MASTER_PORT"] == told[1]["MASTER_PORT"] != "29500"
    assert capfd.readouterr().err == ""


def test_torchruns_names_keep_their_meaning(tmp_path):
    assert run("--nproc-per-node", 2, "--standalone", SCRIPTS / "tells.py", tmp_path) == 0
    assert run("--nproc_per_node=1", "--master-port", 0, "-m", "json.tool", "--help") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.json", "1.json"]


def test_the_process_is_what_it_was_before(tmp_path):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    assert run(SCRIPTS / "tells.py", tmp_path) == 0
    assert {number: signal.getsignal(number) for number in before} == before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_and_everything_that_it_started(number, code):
    command = [sys.executable, "-m", "evenstep.cli.main", "run", "--workers", "2", str(SCRIPTS / "waits.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        pids = [int(pid) for _ in range(2) for pid in launcher.stdout.readline().split()]
        assert len(pids) == 4
        launcher.send_signal(number)
        _, error = launcher.communicate(timeout=30)
    assert launcher.returncode == code
    assert error == f"evenstep: ended by {number.name}: every worker was stopped\n"
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=5)
    assert not alive


SMALL_MEMORY = """
[devices.small]
per_sample = "1 ms"
memory = "1 GB"
memory_per_sample = "100 MB"
[devices.large]
per_sample = "1 ms"
[[workers]]
device = "large"
[[workers]]
device = "small"
"""


def test_a_batch_that_ran_out_of_memory_is_named_and_not_tried_again(tmp_path, capfd):
    (tmp_path / "cluster.toml").write_text(SMALL_MEMORY)
    options = ["--workers", 2, "--emulate", tmp_path / "cluster.toml", "--run-dir", tmp_path / "run"]
    assert run(*options, SCRIPTS / "trains.py", 12) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert "worker 1 ran out of memory with a batch of 12 samples: start again with the same run directory" in last
    (event,) = read_events(tmp_path / "run", kinds=("out_of_memory",))
    assert (event["worker"], event["samples"]) == (1, 12)
    # Nothing smaller has run, so the second start begins at half of it, and learns what fits from there.
    assert run(*options, SCRIPTS / "trains.py", 12) == 0
    plans = [event for event in read_events(tmp_path / "run") if event["event"] == "plan" and event["worker"] == 1]
    assert plans[0]["batch_sizes"] == [12, 12]
    assert plans[1]["batch_sizes"] == [18, 6]
    assert all(plan["batch_sizes"][1] <= 10 for plan in plans[1:])
