"""What befalls one worker under `evenstep run --framework`: it is named, and the run ends."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.frameworks.servers import torch_python
from support.frameworks.table import require
from support.frameworks.task import WORKERS
from support.guard import GUARD_SECONDS
from support.hosts import two_hosts
from support.of_tensorflow import QUIET

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests/support/frameworks/faulty.py")
FRAMEWORKS = ("jax", "tensorflow", "mxnet")

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("frameworks")]
NAMED = {
    "SIGKILL": r"worker 1 was killed by SIGKILL",
    "SIGSTOP": r"worker 1 stood still for 2 s, stopped by a signal",
    "hangs": r"worker 1 did not come to the next exchange within 20 s",
    "never comes": r"worker 1 did not come to prepare within 20 s",
    "exits": r"worker 1 (is gone: its own output tells why|had ended with exit code 0)",
    "raises": r"worker 1 (ended with exit code 1|is gone: its own output tells why)",
}
WAITED_FOR = ("hangs", "never comes")


def command(framework, fault, *options, fifos=()):
    script = [SCRIPT, framework, fault, *map(str, fifos)]
    options = ["--workers", str(WORKERS), "--framework", framework, *options, "--no-python", sys.executable]
    return [torch_python(), "-m", "evenstep", "run", *options, *script]


def environment():
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    return {**os.environ, **QUIET, "PYTHONPATH": paths}


@pytest.mark.parametrize(
    "fault",
    [fault if fault in ("SIGSTOP", "hangs") else pytest.param(fault, marks=pytest.mark.faults) for fault in NAMED],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_worker_that_is_lost_is_named_and_the_run_ends(framework, fault):
    require(framework)
    ended = subprocess.run(
        command(framework, fault, "--timeout", "20" if fault in WAITED_FOR else "120", "--heartbeat", "2"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=GUARD_SECONDS,
        check=False,
    )
    assert ended.returncode, ended.stderr
    said = [line for line in ended.stderr.splitlines() if line.startswith("evenstep: ")]
    assert re.search(NAMED[fault], "\n".join(said)), ended.stderr
    assert "worker 1 takes SIGTERM" not in ended.stdout  # With which torchrun ends it, and waits for 30 s.


def reached(address, ports):
    """How many of the ports a process on this host can connect to, from inside of the namespace that it is in."""
    program = (
        "import socket, sys; print(sum(not socket.socket().connect_ex((sys.argv[1], int(p))) for p in sys.argv[2:]))"
    )
    return [sys.executable, "-c", program, address, *ports]


@pytest.mark.netns
@pytest.mark.parametrize(
    ("framework", "options", "is_open"),
    [("jax", (), False), ("mxnet", (), False), ("tensorflow", (), True), ("tensorflow", ("--private-network",), False)],
)
def test_another_host_reaches_no_port_of_a_run_on_one_host_or_the_terminal_says_so(
    framework, options, is_open, tmp_path
):
    require(framework)
    ports, looked, said = tmp_path / "ports", tmp_path / "looked", tmp_path / "said"
    os.mkfifo(ports)
    os.mkfifo(looked)
    with two_hosts() as ((here, _, address), (there, _, _)), said.open("w") as output:
        started = ["ip", "netns", "exec", here, *command(framework, "listens", *options, fifos=(ports, looked))]
        with subprocess.Popen(started, env=environment(), stdout=output, stderr=subprocess.STDOUT) as run:
            listening = ports.read_text().split()
            assert len(listening) >= WORKERS
            looking = ["ip", "netns", "exec", there, *reached(address, listening)]
            found = int(subprocess.run(looking, capture_output=True, text=True, check=True).stdout)
            looked.write_text("")
            assert run.wait(GUARD_SECONDS) == 0, said.read_text()
    assert (found > 0) is is_open
    assert ("the ports of TensorFlow are open to the network without a secret" in said.read_text()) is is_open
