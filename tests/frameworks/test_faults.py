"""What befalls one worker under `evenstep run --framework`: it is named, and the run ends."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.frameworks.faults import FAULTS, HEARTBEAT, TIMEOUT
from support.frameworks.servers import torch_python
from support.frameworks.table import require
from support.frameworks.task import WORKERS
from support.guard import GUARD_SECONDS
from support.hosts import two_hosts
from support.of_tensorflow import QUIET

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests/support/frameworks/faulty.py")
FRAMEWORKS = ("jax", "tensorflow", "mxnet")
END_SECONDS = 10.0
"""In which SIGTERM ends a run."""

pytestmark = pytest.mark.multiprocess
OFTEN = [(fault, "mid-epoch") for fault in ("stopped", "hangs", "raises", "NaN refused")]
"""The others are for `make faults`."""


def command(framework, folder, fault, moment, *options):
    script = [SCRIPT, framework, fault, moment, str(folder)]
    options = ["--workers", str(WORKERS), "--framework", framework, *options, "--no-python", sys.executable]
    return [torch_python(), "-m", "evenstep", "run", *options, *script]


def environment():
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    return {**os.environ, **QUIET, "PYTHONPATH": paths}


@pytest.mark.parametrize(
    ("fault", "moment"),
    [cell if cell in OFTEN else pytest.param(*cell, marks=pytest.mark.faults) for cell in FAULTS],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_fault_of_one_worker_is_named_and_the_run_ends(framework, fault, moment, tmp_path, record_property):
    require(framework)
    timeout = TIMEOUT if fault == "hangs" or moment == "start" else 120
    ended = subprocess.run(
        command(framework, tmp_path, fault, moment, "--timeout", str(timeout), "--heartbeat", str(HEARTBEAT)),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
        check=False,
    )
    seconds = time.time() - (tmp_path / "fired").stat().st_mtime
    outcome, named = FAULTS[fault, moment]
    assert bool(ended.returncode) is (outcome != "finish"), ended.stderr
    assert re.search(named, ended.stderr), ended.stderr
    if outcome != "finish":
        said = [line for line in ended.stderr.splitlines() if line.startswith("evenstep: ")]
        assert any("worker 1" in line for line in said), ended.stderr
    assert framework != "mxnet" or "SIGABRT" not in ended.stderr  # Of the others, at their exit.
    assert "worker 1 takes SIGTERM" not in ended.stdout  # With which torchrun ends it, and waits for 30 s.
    record_property("cell", [framework, "", moment, fault, outcome, round(seconds, 1)])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sigterm_ends_all_of_a_run(framework, tmp_path):
    require(framework)
    for name in ("ready", "go on"):
        os.mkfifo(tmp_path / name)
    started = command(framework, tmp_path, "waits", "mid-epoch")
    with subprocess.Popen(started, env=environment(), stderr=subprocess.PIPE, text=True) as run:
        (tmp_path / "ready").read_text()
        run.send_signal(signal.SIGTERM)
        _, said = run.communicate(timeout=END_SECONDS)
    assert run.returncode == 128 + signal.SIGTERM
    assert "evenstep: ended by SIGTERM: every worker was stopped" in said


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_run_starts_again_or_says_that_it_cannot(framework, tmp_path):
    require(framework)
    ended = subprocess.run(
        command(framework, tmp_path, "killed", "mid-epoch", "--max-restarts", "1"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
        check=False,
    )
    if framework == "mxnet":
        assert ended.stderr.startswith(
            "evenstep: --max-restarts cannot work with MXNet, whose scheduler lets no worker"
        )
        assert not (tmp_path / "fired").exists()
    else:
        assert ended.returncode == 0, ended.stderr
        assert "worker 1 was killed by SIGKILL" in ended.stderr
        assert (tmp_path / "fired").exists()


def reached(address, ports):
    """How many of the ports a process on this host can connect to, from inside of the namespace that it is in."""
    program = (
        "import socket, sys; print(sum(not socket.socket().connect_ex((sys.argv[1], int(p))) for p in sys.argv[2:]))"
    )
    return [sys.executable, "-c", program, address, *ports]


NAMESPACE = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
"""What docs/servers.md puts before a command."""


@pytest.mark.netns
@pytest.mark.parametrize(
    ("framework", "within", "is_open"),
    [("jax", (), False), ("mxnet", (), False), ("tensorflow", (), True), ("tensorflow", NAMESPACE, False)],
)
def test_another_host_reaches_no_port_of_a_run_on_one_host_or_the_terminal_says_so(
    framework, within, is_open, tmp_path
):
    require(framework)
    said = tmp_path / "said"
    for name in ("ready", "go on"):
        os.mkfifo(tmp_path / name)
    with two_hosts() as ((here, _, address), (there, _, _)), said.open("w") as output:
        started = ["ip", "netns", "exec", here, *within, *command(framework, tmp_path, "listens", "mid-epoch")]
        with subprocess.Popen(started, env=environment(), stdout=output, stderr=subprocess.STDOUT) as run:
            listening = (tmp_path / "ready").read_text().split()
            assert len(listening) >= WORKERS
            looking = ["ip", "netns", "exec", there, *reached(address, listening)]
            found = int(subprocess.run(looking, capture_output=True, text=True, check=True).stdout)
            (tmp_path / "go on").write_text("")
            assert run.wait(GUARD_SECONDS) == 0, said.read_text()
    assert (found > 0) is is_open
    assert ("the ports of TensorFlow are open to the network without a secret" in said.read_text()) is is_open
