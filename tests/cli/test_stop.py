"""Ctrl-C and SIGTERM in the midst of training on real servers: nothing of the run is left on the machine."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest
from support.guard import GUARD_SECONDS

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).parent / "scripts" / "trains_on.py"
SHARED_MEMORY = Path("/dev/shm")
MARK = "TEST_MARK"


def marked(mark):
    """The processes that have this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def files(folder):
    return {path for path in folder.rglob("*") if not path.is_dir()}


def ctrl_c(launcher):
    """As a terminal does: to the foreground process group."""
    os.killpg(launcher.pid, signal.SIGINT)


def terminate(launcher):
    launcher.terminate()


@pytest.mark.parametrize(("stop", "number"), [(ctrl_c, signal.SIGINT), (terminate, signal.SIGTERM)])
def test_a_signal_in_mid_training_ends_every_process_and_leaves_nothing(tmp_path, stop, number):
    run_dir, temporary, mark = tmp_path / "run", tmp_path / "temporary", uuid.uuid4().hex
    temporary.mkdir()
    before = files(SHARED_MEMORY)
    words = ["--workers", "2", "--scheme", "asp", "--run-dir", str(run_dir), str(SCRIPT)]
    with subprocess.Popen(
        [sys.executable, "-m", "evenstep.cli.main", "run", *words],
        env={**os.environ, MARK: mark, "TMPDIR": str(temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as launcher:
        said = sorted(launcher.stdout.readline() for _ in range(2))
        assert said == ["worker 0\n", "worker 1\n"], launcher.stderr.read()
        started = marked(mark)
        assert len(started) >= 4, "a launcher, a server and two workers at the least"
        stop(launcher)
        # Its output ends when nobody has the other end any more.
        _, error = launcher.communicate(timeout=GUARD_SECONDS)
    assert launcher.returncode == 128 + number
    # After what Python says of an interrupt in the workers' scripts; nothing is said of servers, which were to end.
    said = [line for line in error.splitlines() if line.startswith("evenstep: ")]
    assert said == [f"evenstep: ended by {number.name}: every worker was stopped"]
    _, alive = psutil.wait_procs(started, timeout=GUARD_SECONDS)
    assert alive == []
    assert marked(mark) == []
    pids = {str(process.pid) for process in started}
    left = files(SHARED_MEMORY) - before
    assert [path for path in left if "evenstep" in path.name or any(pid in path.name for pid in pids)] == []
    assert [path for path in files(tmp_path) if path.is_socket()] == []
    assert list(temporary.glob("evenstep-*")) == []
    # What was trained is there to be gone on from.
    assert files(run_dir / "snapshots")
