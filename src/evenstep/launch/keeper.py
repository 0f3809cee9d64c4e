"""Keeps one worker: runs it as a child process, so that its death ends nobody else.

torchrun's agent knows how its children end, and says nothing of it before the run is over. So its child is this small
program, which writes down how the worker ended, for the launcher to read. Under servers a worker's death is no reason
to stop the others, as the agent does when one exits with an error: the keeper then exits with 0. It imports the
standard library alone, and is started by its path, so that it runs within a few hundredths of a second. What a death
means for the run is decided elsewhere.

    python -m evenstep.launch.keeper [--restarts N | --tell] STATUS_DIR -- COMMAND...
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final, final

RESTART_VARIABLE: Final = "EVENSTEP_RESTART"
"""How often this worker was started again, in its environment; "0" at first."""

FORWARDED: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
PR_SET_PDEATHSIG: Final = 1
POLL_SECONDS: Final = 1.0
"""How often to look for a parent that is gone, for where the system does not tell."""
END_SECONDS: Final = 5.0
"""How long a worker may take to end once nobody is left who waits for it."""


def keeper_command(status_dir: Path, *, restarts: int | None, command: list[str]) -> list[str]:
    """The command that runs `command` under a keeper, and again up to `restarts` times when it fails.

    With None the keeper exits as the worker did, and its parent may start it again.
    """
    how = ["--tell"] if restarts is None else ["--restarts", str(restarts)]
    # By its path: the package, whose import takes longer than all else here, is not imported. -P: nor is what lies
    # beside the script or in the working directory.
    return [sys.executable, "-P", __file__, *how, str(status_dir), "--", *command]


def status_file(status_dir: Path, worker: int) -> Path:
    """What a keeper writes each time that its worker's process has ended."""
    return status_dir / f"worker-{worker}.json"


def group_file(status_dir: Path, worker: int) -> Path:
    """Holds the process group of a worker and the process of its keeper, as numbers, while the worker runs.

    A third word, `asked`, says that the keeper was asked to end. The file is left behind only by a keeper that was
    killed.
    """
    return status_dir / f"group-{worker}"


def how_it_ended(exit_code: int, why: str) -> str:
    """The rest of a sentence that begins with the worker; a negative exit code is a signal's number."""
    if exit_code < 0:
        return f"was killed by {signal_name(-exit_code)}"
    return f"ended with exit code {exit_code}" + (f": {why}" if why else "")


def signal_name(number: int) -> str:
    """SIGKILL for 9; the number itself where it has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def why_it_failed(message: str) -> str:
    """What the message of an error file says to a user: an error of Python's is known by its type, ours by its text."""
    kind, _, text = message.partition(": ")
    return (text if kind.endswith("Error") else message) or message


@final
class Keeper:
    """Runs one worker to its end, and again where it failed and may be started again.

    The worker has the keeper's standard streams and a process group of its own, which gets the signals that ask the
    keeper to end. What is left of the group of a worker that failed is killed. A worker never outlives its keeper, nor
    the keeper its parent.
    """

    def __init__(self, *, worker: int, command: list[str], status_dir: Path, restarts: int | None) -> None:
        self._worker = worker
        self._command = command
        self._status = status_file(status_dir, worker)
        self._group = group_file(status_dir, worker)
        self._restarts = restarts
        self._process = os.getpid()
        self._parent = os.getppid()
        self._asked_to_end = False
        # Signals wait until they are asked for: there is no moment in which one is missed or interrupts something.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
        _signal_when_parent_dies(signal.SIGTERM)

    def run(self) -> int:
        """Return when the worker has finished, has failed for good, or was asked to end and did.

        Returns: What the keeper is to exit with.
        """
        exit_code = 0
        for restart in range((self._restarts or 0) + 1):
            exit_code = self._run_once(restart)
            again = exit_code != 0 and not self._asked_to_end and restart < (self._restarts or 0)
            self._record(exit_code, restart, again=again)
            if not again:
                break
        if self._restarts is not None:
            return 0
        return 128 - exit_code if exit_code < 0 else exit_code

    def _run_once(self, restart: int) -> int:
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if error_file:
            Path(error_file).unlink(missing_ok=True)
        environment = {**os.environ, RESTART_VARIABLE: str(restart + _restarts_before())}
        child = subprocess.Popen(self._command, env=environment, process_group=0, preexec_fn=self._before_exec)
        self._group.write_text(f"{child.pid} {self._process}")
        while child.poll() is None:
            self._heed_signal(child)
        if child.returncode != 0:
            _signal_group(child.pid, signal.SIGKILL)
        self._group.unlink()
        return child.returncode

    def _before_exec(self) -> None:
        """In the child: die with the keeper, and hear signals as the keeper did at first."""
        _signal_when_parent_dies(signal.SIGKILL)
        if os.getppid() != self._process:
            os._exit(1)  # It died before that was asked for.
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _heed_signal(self, child: "subprocess.Popen[bytes]") -> None:
        received = signal.sigtimedwait({*FORWARDED, signal.SIGCHLD}, POLL_SECONDS)
        if os.getppid() != self._parent:
            self._asked_to_end = True
            _signal_group(child.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(END_SECONDS)
            _signal_group(child.pid, signal.SIGKILL)
            child.wait()
        elif received is not None and received.si_signo in FORWARDED:
            self._asked_to_end = True
            self._group.write_text(f"{child.pid} {self._process} asked")
            _signal_group(child.pid, received.si_signo)
            _signal_group(child.pid, signal.SIGCONT)  # A worker that is stopped would not hear it.

    def _record(self, exit_code: int, restart: int, *, again: bool) -> None:
        message = _message(os.environ.get("TORCHELASTIC_ERROR_FILE"))
        status = {
            "exit_code": exit_code if exit_code >= 0 else None,
            "signal": -exit_code if exit_code < 0 else None,
            "message": message,
            "restarts": restart + _restarts_before(),
            "again": again,
            "asked_to_end": self._asked_to_end,
            "at_seconds": time.time(),
        }
        written = self._status.with_suffix(".tmp")
        written.write_text(json.dumps(status), encoding="utf-8")
        written.replace(self._status)


def _restarts_before() -> int:
    """How often torchrun's agent has started all workers again, and this keeper with them."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _signal_when_parent_dies(number: signal.Signals) -> None:
    """Linux only; elsewhere a keeper notices by looking, and a worker outlives a keeper that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def _signal_group(leader: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _message(error_file: str | None) -> str:
    """The first line of what the worker wrote into torchrun's error file; empty where it wrote nothing."""
    if not error_file:
        return ""
    try:
        message = json.loads(Path(error_file).read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    text = message["message"] if isinstance(message, dict) else message
    return str(text).strip().partition("\n")[0]


def main(arguments: list[str]) -> int:
    """Keep the worker that the environment variable RANK names; returns the exit code."""
    split = arguments.index("--")
    parser = argparse.ArgumentParser(prog="evenstep.launch.keeper")
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--tell", dest="restarts", action="store_const", const=None)
    parser.add_argument("status_dir", type=Path)
    options = parser.parse_args(arguments[:split])
    worker = int(os.environ["RANK"])
    command = arguments[split + 1 :]
    return Keeper(worker=worker, command=command, status_dir=options.status_dir, restarts=options.restarts).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
