import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from support.guard import GUARD_SECONDS

from evenstep.launch.supervisor import keeper_command, status_file

pytestmark = pytest.mark.multiprocess

ERROR = {"message": {"message": "ConfigError: too small: raise it\nmore", "extraInfo": {"timestamp": "1"}}}
# Blocked first: the signal may come as soon as the worker has said that it is ready.
WAITS = (
    "signal.pthread_sigmask(signal.SIG_BLOCK, {{{0}}}); print('ready', flush=True)"
    "; signal.sigwait({{{0}}}); print('heard', flush=True)"
)


@pytest.fixture
def keep(tmp_path):
    """Starts worker 2, a line of Python, under a keeper."""

    @contextmanager
    def keep(program, *arguments, restarts=0, **environment):
        worker = [sys.executable, "-c", f"import os, signal, subprocess, sys\n{program}", *arguments]
        command = keeper_command(tmp_path, restarts=restarts, command=worker)
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        variables = {**os.environ, "RANK": "2", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), **environment}
        with subprocess.Popen(command, env=variables, text=True, start_new_session=True, **pipes) as keeper:
            yield keeper

    return keep


@pytest.fixture
def run(keep, tmp_path):
    """The keeper's exit code, the two outputs, and what it wrote down, None where it wrote nothing."""

    def run(program, *arguments, given="", **options):
        with keep(program, *arguments, **options) as keeper:
            output, error = keeper.communicate(given, timeout=GUARD_SECONDS)
        assert kept(tmp_path)["processes"] == []
        return keeper.returncode, output, error, status(tmp_path)

    return run


def kept(folder):
    return json.loads(status_file(folder, 2).read_text())


def status(folder):
    """How the worker ended."""
    return kept(folder)["end"]


def test_a_worker_that_finishes_has_its_streams_arguments_and_environment(run):
    program = "print(sys.stdin.read(), sys.argv[1:], os.environ['MINE']); print('low', file=sys.stderr)"
    *ended, status = run(program, "--", "-x", given="high", MINE="yes")
    assert ended == [0, "high ['--', '-x'] yes\n", "low\n"]
    assert status["exit_code"] == 0


def test_a_worker_leads_a_process_group_in_the_keepers_session(run):
    program = "print(os.getpgrp() == os.getpid(), os.getsid(0) == os.getppid(), signal.pthread_sigmask(0, []))"
    assert run(program)[1] == "True True set()\n"


def test_a_killed_worker_is_written_down_and_the_keeper_ends_well(run):
    code, _, error, status = run("os.kill(os.getpid(), signal.SIGKILL)")
    assert (code, error) == (0, "")
    assert status.pop("at_seconds") > 0
    about = {"worker": 2, "rank": None, "message": "", "restarts": 0, "again": False, "asked_to_end": False}
    assert status == {"exit_code": -signal.SIGKILL, **about}


def test_a_failed_worker_is_written_down_with_its_message(run):
    program = "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(sys.argv[1]); sys.exit(3)"
    code, _, error, status = run(program, json.dumps(ERROR))
    assert (code, error) == (0, "")
    assert status["exit_code"] == 3
    assert status["message"] == "ConfigError: too small: raise it"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"message": null}', '{"other": 1}'])
def test_a_damaged_error_file_does_no_harm(run, text):
    program = "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(sys.argv[1]); sys.exit(3)"
    code, _, error, status = run(program, text)
    assert (code, error, status["exit_code"]) == (0, "", 3)


@pytest.mark.parametrize("how", ["sys.exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_a_failed_worker_left_of_its_group_is_killed(run, how):
    # The outputs' other ends close, and so the test ends, when nobody has them any more.
    code, output, _, _ = run(f"print(subprocess.Popen(['tail', '-f', '/dev/null']).pid, flush=True); {how}")
    assert code == 0
    assert int(output) > 0


def test_a_failed_worker_is_started_again_as_often_as_asked(run):
    program = "print(os.environ['EVENSTEP_RESTART'], flush=True); sys.exit(7)"
    code, output, error, status = run(program, restarts=2)
    assert (code, output, error) == (0, "0\n1\n2\n", "")
    assert (status["restarts"], status["again"]) == (2, False)


def test_a_worker_that_finishes_in_the_end_has_not_failed(run):
    program = "sys.exit(os.environ['EVENSTEP_RESTART'] != '1' or os.path.exists(os.environ['TORCHELASTIC_ERROR_FILE']))"
    code, _, _, status = run(program, restarts=5)
    assert (code, status["exit_code"], status["restarts"]) == (0, 0, 1)


@pytest.mark.parametrize(("how", "expected"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_a_keeper_that_only_tells_exits_as_its_worker_did(run, how, expected):
    code, _, _, status = run(how, restarts=None, TORCHELASTIC_RESTART_COUNT="4")
    assert code == expected
    assert (status["restarts"], status["again"]) == (4, False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_reaches_the_worker_which_may_finish(keep, tmp_path, number):
    with keep(WAITS.format(int(number)) + "; print(sys.stdin.read())", restarts=3) as keeper:
        assert keeper.stdout.readline() == "ready\n"
        keeper.send_signal(number)
        assert keeper.stdout.readline() == "heard\n"
        assert keeper.communicate("done", timeout=GUARD_SECONDS) == ("done\n", "")
    assert (keeper.returncode, status(tmp_path)["exit_code"]) == (0, 0)


def test_a_worker_that_was_asked_to_end_is_not_started_again(keep, tmp_path):
    program = "child = subprocess.Popen(['tail', '-f', '/dev/null']); print('ready', flush=True); signal.pause()"
    with keep(program, restarts=3) as keeper:
        assert keeper.stdout.readline() == "ready\n"
        keeper.terminate()
        assert keeper.communicate(timeout=GUARD_SECONDS) == ("", "")
    assert keeper.returncode == 0
    assert (status(tmp_path)["exit_code"], status(tmp_path)["asked_to_end"]) == (-signal.SIGTERM, True)


def test_a_signal_to_the_group_of_the_keeper_that_ends_a_worker_as_it_starts_was_a_request(tmp_path):
    """As when torchrun stops a worker that is being started, while it is in the group of its keeper."""
    program = (
        "import os, signal, sys\nfrom evenstep.launch import supervisor\nstart = supervisor.Supervisor.start\n"
        "def ended(*command, **options):\n    worker = start(*command, **options)\n"
        "    for each in (os.getpid(), worker.child.pid):\n        os.kill(each, signal.SIGTERM)\n"
        "    worker.child.wait()\n    return worker\n"
        "supervisor.Supervisor.start = ended\nsys.exit(supervisor.main(sys.argv[1:]))"
    )
    worker = [sys.executable, "-c", "import signal; signal.pause()"]
    keeper = [sys.executable, "-c", program, str(tmp_path), "3", "1", *worker]
    subprocess.run(keeper, env={**os.environ, "RANK": "2"}, timeout=GUARD_SECONDS, check=True)
    assert (status(tmp_path)["exit_code"], status(tmp_path)["asked_to_end"]) == (-signal.SIGTERM, True)
    assert status(tmp_path)["restarts"] == 0


def test_a_worker_dies_with_its_keeper_whose_group_is_left_written_down(keep, tmp_path):
    with keep("print(os.getpid(), flush=True); signal.pause()") as keeper:
        worker = int(keeper.stdout.readline())
        keeper.kill()
        assert keeper.stdout.read() == ""  # the worker had the other end
    found = kept(tmp_path)
    assert (found["processes"], found["keeper"], found["end"]) == ([worker], keeper.pid, None)


def test_a_keeper_whose_parent_dies_ends_its_worker(tmp_path):
    worker = [sys.executable, "-c", "import signal; " + WAITS.format(int(signal.SIGTERM))]
    command = keeper_command(tmp_path, restarts=3, command=worker)
    parent = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *command]
    variables = {**os.environ, "RANK": "0"}
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(parent, env=variables, text=True, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
        # Ends when the keeper, who has the other ends too, is gone.
        assert process.communicate(timeout=GUARD_SECONDS) == ("heard\n", "")
