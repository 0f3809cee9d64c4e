"""The end of one process: it is asked first, and killed if it does not end."""

import signal
import subprocess
import sys

import pytest
from support.guard import GUARD_SECONDS

from evenstep.launch.supervisor import Supervisor

pytestmark = pytest.mark.multiprocess

DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
WAITS = "print('ready', flush=True); signal.pause()"


def started(program):
    supervisor = Supervisor.start([sys.executable, "-c", f"import signal\n{program}"], stdout=subprocess.PIPE)
    assert supervisor.child.stdout.readline() == b"ready\n"
    return supervisor


def test_a_process_that_hears_is_asked_once_and_not_killed():
    supervisor = started(WAITS)
    with supervisor.child:
        assert supervisor.exit_code is None
        while not supervisor.ended_within(0.01):
            supervisor.end(GUARD_SECONDS)
    assert supervisor.exit_code == -signal.SIGTERM


def test_a_process_that_does_not_end_in_time_is_killed():
    supervisor = started(f"{DEAF}; {WAITS}")
    with supervisor.child:
        supervisor.end(0.0)
        assert not supervisor.ended_within(0.01)
        supervisor.end(GUARD_SECONDS)
        assert not supervisor.ended_within(0.01)
        supervisor.end(0.0)
    assert supervisor.exit_code == -signal.SIGKILL


def test_the_group_of_a_process_is_killed_with_it():
    child = "import subprocess; subprocess.Popen(['tail', '-f', '/dev/null'])"
    supervisor = started(f"{child}; {DEAF}; {WAITS}")
    with supervisor.child:
        supervisor.kill()
        # The output ends when no process of the group has its other end any more.
        assert supervisor.child.stdout.read() == b""
    assert supervisor.exit_code == -signal.SIGKILL


def test_a_process_that_is_gone_can_be_ended():
    supervisor = started("print('ready', flush=True)")
    with supervisor.child:
        assert supervisor.ended_within(GUARD_SECONDS)
        for _ in range(3):
            supervisor.end(0.0)
    assert supervisor.exit_code == 0
