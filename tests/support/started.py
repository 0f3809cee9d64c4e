"""Commands such as `evenstep run`, forked from the process that has imported torch rather than started from nothing."""

import os
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil

from support.guard import GUARD_SECONDS
from support.processes import CONTEXT


class Started:
    """A process that calls `command(*arguments)` and exits with what that returns.

    Like one that a shell starts it leads a session and has its own standard streams, `stdout` and `stderr` here.
    Whatever is left of it and its children at the end of the `with` block is killed.
    """

    def __init__(self, command, *arguments, environment=None):
        streams = [CONTEXT.Pipe(duplex=False) for _ in range(2)]
        ours, theirs = zip(*streams, strict=True)
        self._process = CONTEXT.Process(target=_call, args=(theirs, environment or {}, command, arguments))
        self._process.start()
        self.pid = self._process.pid
        for end in theirs:
            end.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(end.fileno())) for end in ours)
        for end in ours:
            end.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._process.is_alive():
            for process in (*psutil.Process(self.pid).children(recursive=True), psutil.Process(self.pid)):
                process.kill()
        self._process.join()
        for stream in (self.stdout, self.stderr):
            stream.close()

    @property
    def returncode(self):
        return self._process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        self._process.kill()

    def communicate(self, timeout=GUARD_SECONDS):
        """All that it still says, once neither it nor a child of its has the other ends any more."""
        with ThreadPoolExecutor(2) as pool:
            reads = [pool.submit(stream.read) for stream in (self.stdout, self.stderr)]
            self._process.join(timeout)
            if self._process.is_alive():
                self.__exit__()
                raise subprocess.TimeoutExpired(str(self._process), timeout)
            return tuple(read.result() for read in reads)


def ended(processes):
    """The exit codes of processes that wait for each other, and what each wrote to standard error."""
    with ExitStack() as stack, ThreadPoolExecutor(len(processes)) as pool:
        for process in processes:
            stack.enter_context(process)
        said = [error for _, error in pool.map(Started.communicate, processes)]
    return [process.returncode for process in processes], said


def _call(streams, environment, command, arguments):
    os.setsid()
    os.environ.update(environment)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    try:
        code = command(*arguments)
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.exit(code)  # Once its threads have ended, too.


def torchrun(*words):
    """`torchrun WORDS`."""
    from torch.distributed.run import main

    main(list(map(str, words)))


def script(path, *words):
    """`python PATH WORDS`."""
    sys.argv = [str(path), *map(str, words)]
    runpy.run_path(str(path), run_name="__main__")


def evenstep(*words):
    """`evenstep WORDS`; returns its exit code."""
    from evenstep.cli.main import main

    return main(list(map(str, words)))
