"""Starts, watches and ends one process. As a program, this file is the keeper of a worker.

torchrun's agent knows how its children end, but reports it only after the run. Its child is therefore the keeper, which
runs the worker and writes down how it ended, for the launcher to read. If a child exits with an error, the agent stops
the others; on servers they can go on without the dead worker, so the keeper then exits with 0. The file imports
the standard library alone and the keeper is started by its path, so that it runs within a few hundredths of a second.

    python supervisor.py STATUS_DIR RESTARTS PROCESSES COMMAND...

With `none` for RESTARTS, the keeper exits as its worker did. A replica of an elastic run may have several PROCESSES.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, final

RESTART_VARIABLE: Final = "EVENSTEP_RESTART"
"""Environment variable of a worker: how often it was restarted; "0" at first."""
TASKS_VARIABLE: Final = "EVENSTEP_TASKS"
"""Environment variable: the addresses of all workers under TensorFlow, by rank; the keeper makes TF_CONFIG of them."""
FORWARDED: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM})
POLL_SECONDS: Final = 1.0  # How often a keeper checks whether its parent is gone, where the system does not report it.
END_SECONDS: Final = 5.0  # How long a worker may take to end after it was asked to.


@final
class Supervisor:
    """One process, started here or elsewhere: whether it runs, how it ended, and its end.

    Args:
        asked: The process that is asked to end; negative for a process group.
        killed: The process, or process group, that is killed if it does not end.
        child: The process, if this process started it.
    """

    def __init__(self, asked: int, killed: int, child: "subprocess.Popen[bytes] | None" = None) -> None:
        self._asked = asked
        self._killed = killed
        self._child = child
        self._asked_at: float | None = None

    @classmethod
    def start(cls, command: Sequence[str], *, leader: int = 0, **options: Any) -> Self:  # noqa: ANN401 - those of Popen
        """Start a process in a group of its own or of another `leader`, which signals from the terminal do not reach.

        The group is asked to end, and killed, through the supervisor of its leader.
        """
        child = subprocess.Popen(command, process_group=leader, **options)
        own = child.pid if leader else -child.pid
        return cls(own, own, child)

    @property
    def child(self) -> "subprocess.Popen[bytes]":
        """The process that was started here."""
        assert self._child is not None
        return self._child

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process that was started here: negative for a signal, None while it runs."""
        return self.child.poll()

    def ended_within(self, seconds: float) -> bool:
        """Wait at most this long for the process that was started here; return whether it has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(seconds)
        return self.exit_code is not None

    def end(self, seconds: float) -> None:
        """Ask the process to end, or kill it if it was asked more than `seconds` ago. Call this until it has ended."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self.send(signal.SIGTERM)
        elif time.monotonic() - self._asked_at > seconds:
            self.kill()

    def send(self, number: int) -> None:
        """Send a signal to the process that is asked to end."""
        _send(self._asked, number)

    def kill(self) -> None:
        """Kill the process, and with a process group what is left of it; wait for the end of a child."""
        _send(self._killed, signal.SIGKILL)
        if self._child is not None:
            self._child.wait()


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def keeper_command(status_dir: Path, *, restarts: int | None, command: list[str], processes: int = 1) -> list[str]:
    """Return the command that runs `command` under a keeper, with up to `restarts` restarts when it fails.

    With None the keeper exits as the worker did, and its parent may restart it. A worker of several `processes` fails
    with the first of them.
    """
    # -P and the path: neither the package, whose import takes longer than all else, nor a module beside this file or in
    # the working directory is imported.
    kept = str(status_dir), "none" if restarts is None else str(restarts), str(processes)
    return [sys.executable, "-P", __file__, *kept, *command]


def status_file(status_dir: Path, worker: int) -> Path:
    """Return the file in which the keeper of a worker writes down what it does: the fields of `watch.Kept` as JSON."""
    return status_dir / f"worker-{worker}.json"


@final
class Keeper:
    """Runs one worker to its end, and restarts it if it fails and may be restarted.

    The worker has the keeper's standard streams and leads a process group, which gets the signals that ask the keeper
    to end. What a failed worker leaves of its group is killed. A worker never outlives its keeper, nor the keeper its
    parent. Several processes share the group; they meet at a port of their own, as under a torchrun of their own.
    """

    def __init__(
        self, *, worker: int, command: list[str], status_dir: Path, restarts: int | None, processes: int = 1
    ) -> None:
        self._command = command
        self._processes = processes
        self._file = status_file(status_dir, worker)
        # The agent may have restarted all workers, and their keepers.
        before = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else {"end": None}
        self._kept: dict[str, object] = {**before, "worker": worker, "keeper": os.getpid()}
        self._restarts = restarts
        self._process = os.getpid()
        self._parent = os.getppid()
        self._asked_to_end = False
        # Blocked signals wait until they are asked for, so none is missed or interrupts anything.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*FORWARDED, signal.SIGCHLD})
        signal_when_parent_dies(signal.SIGTERM)

    def run(self) -> int:
        """Return the keeper's exit code when the worker has finished, failed for good, or ended when asked to."""
        restart, again = -1, True
        while again:
            restart += 1
            exit_code, rank = self._run_once(restart)
            again = exit_code != 0 and not self._asked_to_end and restart < (self._restarts or 0)
            end = {
                "worker": self._kept["worker"],
                "exit_code": exit_code,
                "message": first_message(_error_file(rank)),
                "restarts": restart + _restarts_before(),
                "again": again,
                "asked_to_end": self._asked_to_end,
                "at_seconds": time.time(),
                "rank": rank,
            }
            self._write(processes=[], end=end)
        if self._restarts is not None:
            return 0
        return 128 - exit_code if exit_code < 0 else exit_code

    def _run_once(self, restart: int) -> tuple[int, int | None]:
        """Return the exit code, and of several processes the one that ended first."""
        environment = {**os.environ, RESTART_VARIABLE: str(restart + _restarts_before()), **_place()}
        workers: list[Supervisor] = []
        for own in [{}] if self._processes == 1 else _places(self._processes):
            if error_file := (environment | own).get("TORCHELASTIC_ERROR_FILE"):
                Path(error_file).unlink(missing_ok=True)
            leader = workers[0].child.pid if workers else 0
            start = partial(Supervisor.start, self._command, leader=leader, preexec_fn=self._before_exec)
            workers.append(start(env=environment | own))
        self._write(processes=[each.child.pid for each in workers], asked=False)
        while (ended := _ended_first(workers)) is None:
            self._take_signal(workers[0])
        exit_code = workers[ended].child.returncode
        # A signal to the keeper's group also ends a worker that has not left it yet.
        self._asked_to_end |= -exit_code in FORWARDED & signal.sigpending()
        if exit_code != 0 or self._orphaned:
            for each in workers:  # The first kills the group.
                each.kill()
        return exit_code, ended if self._processes > 1 else None

    @property
    def _orphaned(self) -> bool:
        return os.getppid() != self._parent

    def _before_exec(self) -> None:
        """In the child: die with the keeper, and receive signals as the keeper did at first."""
        signal_when_parent_dies(signal.SIGKILL)
        if os.getppid() != self._process:
            os._exit(1)  # The keeper died before that was asked for.
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _take_signal(self, worker: Supervisor) -> None:
        received = signal.sigtimedwait({*FORWARDED, signal.SIGCHLD}, POLL_SECONDS)
        if self._orphaned:
            self._asked_to_end = True
            worker.end(END_SECONDS)
        elif received is not None and received.si_signo in FORWARDED:
            self._asked_to_end = True
            self._write(asked=True)
            worker.send(received.si_signo)
            worker.send(signal.SIGCONT)  # A stopped worker would not receive the signal.

    def _write(self, **news: object) -> None:
        self._kept |= news
        written = self._file.with_suffix(".tmp")
        written.write_text(json.dumps(self._kept), encoding="utf-8")
        written.replace(self._file)


def _restarts_before() -> int:
    """Return how often torchrun's agent has restarted all workers, and this keeper with them."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _place() -> dict[str, str]:
    """Return the `TF_CONFIG` of a worker of TensorFlow; empty for other workers."""
    tasks = os.environ.get(TASKS_VARIABLE)
    if not tasks:
        return {}
    task = {"type": "worker", "index": int(os.environ["RANK"])}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": tasks.split(",")}, "task": task})}


def _places(processes: int) -> list[dict[str, str]]:
    """Return what the environment of each process of a replica says of its place."""
    replica, here = os.environ["RANK"], int(os.environ.get("LOCAL_RANK", "0"))
    with socket.socket() as trial:  # The first process listens on this port.
        trial.bind(("", 0))
        port = trial.getsockname()[1]
    common = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "LOCAL_WORLD_SIZE": str(processes * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        "REPLICA_GROUP_ID": replica,
        "NUM_REPLICA_GROUPS": os.environ["WORLD_SIZE"],
    }
    places = []
    for rank in range(processes):
        own = {"RANK": str(rank), "LOCAL_RANK": str(here * processes + rank)}
        if error_file := _error_file(rank):
            own["TORCHELASTIC_ERROR_FILE"] = error_file
        places.append(common | own)
    return places


def _error_file(rank: int | None) -> str | None:
    """Return torchrun's error file, or that of this process of a replica."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return f"{file}.{rank}" if file and rank is not None else file


def _ended_first(workers: Sequence[Supervisor]) -> int | None:
    """Return which of these has failed, or the last if all have finished; None while they run."""
    codes = [each.exit_code for each in workers]
    failed = [index for index, code in enumerate(codes) if code]
    return failed[0] if failed else None if None in codes else len(codes) - 1


def signal_when_parent_dies(number: signal.Signals) -> None:
    """Signal this process when its parent dies. Linux only: elsewhere a worker outlives a keeper that is killed."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(number), 0, 0, 0)


def first_message(error_file: str | None) -> str:
    """Return the first line of the worker's message in torchrun's error file; empty if there is none."""
    if not error_file:
        return ""
    try:
        message = json.loads(Path(error_file).read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    text = message["message"] if isinstance(message, dict) else message
    return str(text).strip().partition("\n")[0]


def main(arguments: list[str]) -> int:
    """Keep the worker that the environment variable RANK names; return the exit code."""
    folder, restarts, processes, *command = arguments
    keeper = Keeper(
        worker=int(os.environ["RANK"]),
        command=command,
        status_dir=Path(folder),
        restarts=None if restarts == "none" else int(restarts),
        processes=int(processes),
    )
    return keeper.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
