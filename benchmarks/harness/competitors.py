"""What takes a worker's core away: a process that competes for it, and a quota. Both are real, and both are turned on
and off while the worker trains.
"""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

QUOTA, PERIOD = 5_000, 10_000
"""Microseconds: half a core, in periods short against an iteration."""
GROUPS = Path("/sys/fs/cgroup/cpu")
"""The folder of the control groups of version 1."""
# It dies with the worker that started it, even while it is stopped.
_BURN = """
import ctypes, os, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == {parent}:
    os.write(1, b".")
    while True:
        pass
"""


class Nobody:
    """No competitor: for the workers that are left alone."""

    def turn(self, on):
        """Do nothing."""


class Hog:
    """A process that takes all it can get of one core."""

    def __init__(self, core):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BURN.format(parent=os.getpid())], stdout=subprocess.PIPE
        )
        os.sched_setaffinity(self._process.pid, {core})
        assert self._process.stdout.read(1)
        self.turn(on=False)

    def turn(self, on):
        self._process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)

    def end(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


class Quota:
    """A quota of half a core for this whole process, in a control group of its own."""

    def __init__(self):
        self._folder = GROUPS / f"evenstep-benchmark-{os.getpid()}"
        self._folder.mkdir()
        self._write("cpu.cfs_period_us", PERIOD)
        self._write("cgroup.procs", os.getpid())

    def turn(self, on):
        self._write("cpu.cfs_quota_us", QUOTA if on else -1)

    def end(self):
        (GROUPS / "cgroup.procs").write_text(str(os.getpid()))
        self._folder.rmdir()

    def _write(self, name, value):
        (self._folder / name).write_text(str(value))


@contextmanager
def competitor(kind, core):
    """A competitor of this process, turned off: `hog` or `quota`; nobody where `kind` is None."""
    if kind is None:
        yield Nobody()
        return
    one = Hog(core) if kind == "hog" else Quota()
    try:
        yield one
    finally:
        one.end()


def why_no_quota():
    """Why this process cannot have a quota; None where it can."""
    if not (GROUPS / "cpu.cfs_quota_us").exists():
        return "no control groups of version 1 for cpu are mounted at /sys/fs/cgroup/cpu"
    if not os.access(GROUPS, os.W_OK):
        return "only root may set a quota"
    return None


def pin(core):
    """Keep every thread that this process has, and those that it starts, on one core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})
