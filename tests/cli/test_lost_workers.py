"""Workers of `evenstep run` that are lost: each is named on the terminal, and the run ends as it says it does."""

import os
import re
import signal
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.guard import GUARD_SECONDS
from support.started import Started, evenstep

pytestmark = pytest.mark.multiprocess

SCRIPTS = Path(__file__).parent / "scripts"


def run(*words, timeout, faults):
    """Exit code, which workers met their fault, which finished, and what the launcher said of workers, in its order."""
    words = (*words, "--workers", len(faults), SCRIPTS / "meets_faults.py", timeout, *faults)
    with Started(evenstep, "run", *words) as launcher:
        printed, error = launcher.communicate()
    met = {int(rank) for rank in re.findall(r"worker (\d) meets", printed)}
    assert met == {rank for rank, fault in enumerate(faults) if fault != "none"}, error
    finished = {int(rank) for rank in re.findall(r"worker (\d) finished", printed)}
    return launcher.returncode, finished, re.findall(r"^evenstep: (worker .*)", error, re.MULTILINE)


def test_workers_that_stop_leave_or_die_on_servers_are_named_and_the_others_finish():
    faults = ["none", "middle:SIGSTOP", "middle:os._exit", "middle:exit", "middle:SIGKILL"]
    words = ("--scheme", "ssp:bound=2", "--heartbeat", 6)
    code, finished, said = run(*words, timeout=20, faults=faults)
    assert (code, finished) == (0, {0})
    # What the others do then depends on how soon it is heard.
    assert {
        "worker 1 was silent for 6 s",
        "worker 2 ended with exit code 0 in the middle of an epoch",
        "worker 3 left in the middle of an epoch",
        "worker 4 was killed by SIGKILL",
    } <= {line.partition("; ")[0] for line in said[:-4]}
    assert "worker 1 was silent for 6 s; the others go on" in said
    assert [sum(line.startswith(f"worker {rank} ") for line in said) for rank in (2, 3)] == [2, 1]
    without = "; the others finished without it"
    assert said[-4:] == [
        "worker 1 did not come back within 20 s, and is ended",
        f"worker 1 was silent for 6 s and did not come back{without}",
        f"worker 2 ended with exit code 0 in the middle of an epoch{without}",
        f"worker 4 was killed by SIGKILL, which is what a system out of memory does{without}",
    ]


def test_an_end_before_prepare_ends_a_run_on_servers_at_once_with_one_sentence():
    ended = run("--scheme", "ssp:bound=2", timeout=600, faults=["none", "start:exit"])
    how = "ended with exit code 0 before it called prepare"
    assert ended == (1, set(), [f"worker 1 {how}; the others were stopped, since all workers must call prepare"])


def test_a_restart_of_all_workers_is_told_with_its_cause():
    words = ("--scheme", "lb-bsp", "--max-restarts", 1)
    code, finished, said = run(*words, timeout=60, faults=["none", "middle:os._exit"])
    assert (code, finished) == (0, {0, 1})
    assert said == ["worker 1 ended with exit code 0 before the others were done; all workers start again (1 of 1)"]


# Without servers, workers run under keepers too.


@contextmanager
def waiting():
    """A launcher of two workers that wait, and the processes that these and their children are."""
    with Started(evenstep, "run", "--workers", 2, SCRIPTS / "waits.py") as launcher:
        pids = [int(pid) for _ in range(2) for pid in launcher.stdout.readline().split()]
        yield launcher, [psutil.Process(pid) for pid in pids]


def assert_gone(processes):
    _, alive = psutil.wait_procs(processes, timeout=GUARD_SECONDS)
    assert alive == []


def test_no_worker_outlives_a_launcher_that_is_killed():
    with waiting() as (launcher, processes):
        keepers = [process.parent() for process in processes[::2]]
        launcher.kill()
        launcher.communicate()
        assert_gone([*processes, *keepers])


def test_a_keeper_that_is_killed_is_told_of_as_what_it_is():
    with waiting() as (launcher, processes):
        (keeper,) = {worker.parent() for worker in processes[::2] if worker.environ()["RANK"] == "1"}
        os.kill(keeper.pid, signal.SIGKILL)
        _, error = launcher.communicate()
        assert_gone(processes)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert error == (
        "evenstep: the keeper of worker 1 was killed by SIGKILL, and the worker with it; the others were stopped\n"
    )
