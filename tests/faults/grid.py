"""Runs cells of the grid, and looks what came of them."""

import json
import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from support.faults import meeting_place
from support.guard import GUARD_SECONDS
from support.hosts import ip, two_hosts
from support.processes import CONTEXT

from evenstep.core.supervision import Supervision
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.server_settings import SECRET_VARIABLE
from evenstep.launch.supervisor import first_message, status_file
from evenstep.launch.watch import Watch
from faults import worker
from faults.cells import COUNT, LINK, PAUSE_SECONDS, SERVER

POLL_SECONDS = 0.05
SCRIPT = Path(worker.__file__)


@dataclass
class Outcome:
    """What came of a cell.

    Attributes:
        fired: The victims whose faults took place.
        codes: Exit codes of the workers, or of the launcher under the key None; None for one that had to be killed.
        terminal: What was written to the terminal.
        finished: The workers that came to the end of their script.
        batches: What was stepped on: worker, life, epoch, positions, and whether others did it instead.
        in_hand: The epochs and positions that workers had in hand last which did not finish.
        seconds: From the fault to the end of the last worker that ended by itself.
        left: Processes and files that were left behind.
    """

    fired: set = field(default_factory=set)
    codes: dict = field(default_factory=dict)
    terminal: str = ""
    finished: set = field(default_factory=set)
    batches: list = field(default_factory=list)
    in_hand: set = field(default_factory=set)
    seconds: float = 0.0
    left: list = field(default_factory=list)


def run_cell(cell, folder):
    """Its outcome; `folder` is its own and empty."""
    outcome = Outcome()
    run = {"forked": _run_forked, "two hosts": _run_on_two_hosts}.get(cell.launcher, _run_launched)
    run(cell, folder, outcome)
    fired = {victim: folder / f"fired-{victim}" for victim in cell.faults}
    outcome.fired = {victim for victim, file in fired.items() if file.exists()}
    outcome.seconds = time.time() - max((fired[victim].stat().st_mtime for victim in outcome.fired), default=math.inf)
    outcome.finished = {int(path.name.partition("-")[2]) for path in folder.glob("finished-*")}
    for path in folder.glob("journal-*"):
        rank = int(path.name.partition("-")[2])
        outcome.batches += [(rank, *json.loads(line)) for line in path.read_text().splitlines()]
    for rank in set(range(cell.count)) - outcome.finished:
        with suppress(FileNotFoundError, ValueError):  # It may have been ended while it wrote.
            epoch, positions = json.loads((folder / f"hand-{rank}").read_text())
            outcome.in_hand |= {(epoch, position) for position in positions}
    # torch leaves its logs and caches, whatever happens.
    outcome.left += [str(path) for path in (folder / "tmp").iterdir() if not path.name.startswith("torch")]
    return outcome


def check(cell, outcome):
    """What is wrong with an outcome, as sentences."""
    expected = cell.expected
    wrong = [f"nothing befell {victim}" for victim in cell.faults if victim not in outcome.fired]
    finish = {"finish": cell.others, "finish alone": {0}}.get(expected.others, set())
    if not finish <= outcome.finished:
        wrong.append(f"workers {sorted(finish - outcome.finished)} did not finish")
    if (cell.others - finish) & outcome.finished:
        wrong.append(f"workers {sorted((cell.others - finish) & outcome.finished)} finished")
    wrong += _check_victim(cell, expected, outcome)
    if any(code is None for rank, code in outcome.codes.items() if rank not in cell.faults):
        wrong.append("something had to be killed since it did not end")
    wrong += [
        f"nothing on the terminal names {each}" for each in expected.named if not _names(cell, each, outcome.terminal)
    ]
    if finish and SERVER not in cell.faults:  # A server that comes back says what is lost.
        wrong += _check_samples(cell, outcome)
    return [*wrong, *(f"{each} was left behind" for each in outcome.left)]


def _check_victim(cell, expected, outcome):
    victims = [each for each in cell.faults if isinstance(each, int)]
    if cell.moment == "close":  # The end of the script and the fault are the same moment.
        return []
    finished = [each for each in victims if each in outcome.finished]
    if expected.victim == "finishes" and finished != victims:
        return [f"of the victims {victims} only {finished} finished"]
    if expected.victim in ("ended", "stays") and finished:
        return [f"the victims {finished} finished"]
    if expected.victim == "ended" and any(outcome.codes.get(each, 0) is None for each in victims):
        return ["a victim was not ended"]
    return []


def _names(cell, victim, terminal):
    """Whether evenstep, or an error of it, tells of the victim; torchrun does where it stops the others at once."""
    if cell.launcher == "torchrun" and re.search(rf"local_rank: {victim}\b", terminal):
        return True
    told = re.findall(r"(?:evenstep: |evenstep\.core\.errors\.\w+: )(.*)", terminal)
    name = re.compile(
        r"server 0\b" if victim == SERVER else rf"[Ww]orkers? (\d+(, | and ))*{victim}\b|missing: {victim}\b"
    )
    return any(name.search(line) for line in told)


def _check_samples(cell, outcome):
    """Each position of each epoch was done by exactly one worker, in the lives that count."""
    counted = [each for each in outcome.batches if not each[4]]
    if cell.restarts and not cell.served:
        last = max(life for _, life, *_ in counted)
        counted = [each for each in counted if each[1] == last]
    done = [(epoch, position) for _, _, epoch, positions, _ in counted for position in positions]
    if cell.victim == LINK:  # What was pushed when the link was cut may have come, while the answer did not.
        done += outcome.in_hand - set(done)
    whole = [(epoch, position) for epoch in range(worker.RUN.epochs) for position in range(worker.RUN.samples)]
    return [] if sorted(done) == whole else ["not every sample of every epoch was done once"]


# In forked processes, with the test in the launcher's place.


def _run_forked(cell, folder, outcome):
    for name in ("tmp", "status"):
        (folder / name).mkdir()
    environment = {"TMPDIR": str(folder / "tmp"), "WORLD_SIZE": str(COUNT), **meeting_place()}
    said, supervision = [], Supervision(workers=COUNT)
    watch = Watch(
        folder / "status",
        supervision,
        say=lambda text: said.append(f"evenstep: {text}\n"),
        end_seconds=0.5,
    )
    with _servers(cell, folder, watch) as told:
        workers = Workers(cell, {**environment, **told}, folder)
        try:
            if cell.served:
                with watch:
                    workers.follow(supervision)
            else:
                workers.follow(None)
        finally:
            outcome.codes = workers.end()
            outcome.left += workers.left()
    outcome.terminal = "".join([*said, *(path.read_text() for path in sorted(folder.glob("terminal-*")))])
    if supervision.stopped is not None:
        outcome.terminal += f"evenstep: {supervision.stopped}\n"


class Workers:
    """The forked workers of a cell, each of which leads a session."""

    def __init__(self, cell, environment, folder):
        self._cell = cell
        self._folder = folder
        self._status = folder / "status"
        self._processes = []
        for rank in range(COUNT):
            own = {**environment, "TORCHELASTIC_ERROR_FILE": str(folder / f"error-{rank}.json")}
            process = CONTEXT.Process(target=worker.run_forked, args=(cell, rank, own, str(folder)))
            process.start()
            self._write(rank, process, processes=[process.pid])
            self._processes.append(process)
        self._running = dict(enumerate(self._processes))

    def follow(self, supervision):
        """Until all have ended, or all but a victim that is to stay; the victim goes on after its pause."""
        ends = time.monotonic() + GUARD_SECONDS
        while self._running and time.monotonic() < ends:
            _go_on(self._cell, self._folder)
            for rank, process in list(self._running.items()):
                process.join(POLL_SECONDS / COUNT)
                if process.exitcode is not None:
                    self._note(rank, process.exitcode, supervision)
            if set(self._running) <= set(self._cell.faults) and self._cell.expected.victim == "stays":
                return

    def _note(self, rank, exit_code, supervision):
        """As a keeper does."""
        asked = supervision is not None and (supervision.stopped is not None or rank in supervision.to_end)
        del self._running[rank]
        end = {
            "worker": rank,
            "exit_code": exit_code,
            "message": first_message(str(self._folder / f"error-{rank}.json")),
            "asked_to_end": asked,
            "at_seconds": time.time(),
        }
        self._write(rank, self._processes[rank], end=end)

    def _write(self, rank, process, **kept):
        file = status_file(self._status, rank)
        file.with_suffix(".tmp").write_text(json.dumps({"worker": rank, "keeper": process.pid, **kept}))
        file.with_suffix(".tmp").replace(file)

    def end(self):
        """Kill what is left, and the exit codes of all, None for those that were killed."""
        codes = {rank: process.exitcode for rank, process in enumerate(self._processes)}
        for process in self._processes:
            process.kill()
            process.join()
        return codes

    def left(self):
        """What is left in the sessions of the workers."""
        sessions = {process.pid for process in self._processes}
        left = []
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.Error):
                if os.getsid(process.pid) in sessions:
                    left.append(f"process {process.pid} {' '.join(process.cmdline())}")
                    process.kill()
        return left


def _go_on(cell, folder):
    """Let a paused victim go on, once its time has come."""
    fired = folder / f"fired-{cell.victim}"
    if cell.fault != "paused" or not fired.exists() or (folder / "went-on").exists():
        return
    if time.time() - fired.stat().st_mtime >= PAUSE_SECONDS:
        os.kill(int(fired.read_text()), signal.SIGCONT)
        (folder / "went-on").touch()


@contextmanager
def _servers(cell, folder, watch):
    """What workers are told of a forked server, whose events go to the watch; the heartbeat alone if there is none."""
    if not cell.served:
        yield LaunchSettings(heartbeat_seconds=cell.heartbeat).to_environment()
        return
    secret = secrets.token_hex(32)
    ours, theirs = CONTEXT.Pipe()
    settings = {
        "index": 0, "count": 1, "workers": COUNT, "snapshots": str(folder / "snapshots"),
        "heartbeat_seconds": cell.heartbeat,
    }  # fmt: skip
    server = CONTEXT.Process(target=_serve, args=(settings, secret, theirs, str(folder)))
    server.start()
    theirs.close()
    said = os.fdopen(os.dup(ours.fileno()), "rb")
    addresses = json.loads(said.readline())["addresses"]

    def listen():
        for line in said:
            if line.strip():
                watch.told(json.loads(line))

    listening = threading.Thread(target=listen)
    listening.start()
    launched = LaunchSettings(servers=(tuple(addresses),))
    try:
        yield {**launched.to_environment(), SECRET_VARIABLE: secret}
    finally:
        # The end of its input, while its last words can still be read.
        with socket.socket(fileno=os.dup(ours.fileno())) as wire:
            wire.shutdown(socket.SHUT_WR)
        server.join(GUARD_SECONDS)
        server.kill()
        server.join()
        listening.join()
        said.close()
        ours.close()
    assert server.exitcode == 0, f"the server ended with {server.exitcode}"


def _serve(settings, secret, end, folder):
    from evenstep.server import program

    os.environ[SECRET_VARIABLE] = secret
    terminal = os.open(os.path.join(folder, "terminal-server"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(terminal, 2)
    os.dup2(end.fileno(), 1)
    sys.stdin = os.fdopen(os.dup(end.fileno()), "rb")
    end.close()
    sys.stdout = os.fdopen(1, "w", closefd=False)
    os._exit(program.main([json.dumps(settings)]))


# Under the launchers.


def _run_launched(cell, folder, outcome):
    (folder / "tmp").mkdir()
    mark = secrets.token_hex(8)
    script = [str(SCRIPT), json.dumps(asdict(cell)), str(folder)]
    if cell.launcher == "evenstep run":
        options = ["--workers", str(COUNT), "--scheme", worker.SCHEMES[cell.scheme], "--heartbeat", str(cell.heartbeat)]
        command = ["-m", "evenstep.cli.main", "run", *options]
    else:
        command = ["-m", "torch.distributed.run", "--nproc-per-node", str(COUNT), "--standalone"]
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), worker.MARK: mark, "OMP_NUM_THREADS": "1"}
    with (folder / "terminal").open("wb") as terminal:
        launcher = subprocess.Popen(
            [sys.executable, *command, "--max-restarts", str(cell.restarts), *script],
            env=environment, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, start_new_session=True,
        )  # fmt: skip
    outcome.codes[None] = _follow_launcher(cell, folder, launcher)
    outcome.left += marked(mark)
    outcome.terminal = (folder / "terminal").read_text()


def _follow_launcher(cell, folder, launcher):
    """Its exit code; None where it had to be killed, as it does where nobody waits for a victim that stays."""
    ends = time.monotonic() + GUARD_SECONDS
    while time.monotonic() < ends:
        _go_on(cell, folder)
        with suppress(subprocess.TimeoutExpired):
            return launcher.wait(POLL_SECONDS)
    launcher.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        launcher.wait(40.0)
    launcher.kill()
    launcher.wait()
    return None


def marked(mark):
    """The processes that are left of those that a launcher has started; they are killed."""
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(worker.MARK) == mark:
                left.append(f"process {process.pid} {' '.join(process.cmdline())[:200]}")
                process.kill()
    return left


# On two hosts.


def _run_on_two_hosts(cell, folder, outcome):
    (folder / "tmp").mkdir()
    with two_hosts() as hosts:
        place = {
            **LaunchSettings(heartbeat_seconds=cell.heartbeat).to_environment(), SECRET_VARIABLE: secrets.token_hex(32),
            "MASTER_ADDR": hosts[0][2], "MASTER_PORT": "29400", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
            "LOCAL_WORLD_SIZE": "1", "TMPDIR": str(folder / "tmp"), worker.MARK: secrets.token_hex(8),
        }  # fmt: skip
        processes = [
            _start_on(host, [str(SCRIPT), json.dumps(asdict(cell)), str(folder)], {**place, "RANK": str(rank)}, folder)
            for rank, host in enumerate(hosts)
        ]
        cut(cell, folder, hosts[cell.side])
        ends = time.monotonic() + GUARD_SECONDS
        for rank, process in enumerate(processes):
            with suppress(subprocess.TimeoutExpired):
                outcome.codes[rank] = process.wait(max(ends - time.monotonic(), 0.0))
            process.kill()
            process.wait()
        outcome.left += marked(place[worker.MARK])
    outcome.codes = {rank: outcome.codes.get(rank) for rank in range(len(hosts))}
    outcome.terminal = "".join(path.read_text() for path in sorted(folder.glob("terminal-*")))


def _start_on(host, command, environment, folder):
    namespace, interface, _ = host
    with (folder / f"terminal-{environment['RANK']}").open("wb") as terminal:
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, *command],
            env={**os.environ, **environment, "GLOO_SOCKET_IFNAME": interface},
            stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal,
        )  # fmt: skip


def wait_for(file):
    ends = time.monotonic() + GUARD_SECONDS
    while not file.exists() and time.monotonic() < ends:
        time.sleep(POLL_SECONDS)


def cut(cell, folder, host):
    """Take down this host's end of the link once the fault is due, and up again where that is for a while."""
    namespace, interface, _ = host
    wait_for(folder / f"fired-{cell.victim}")
    ip("-n", namespace, "link", "set", interface, "down")
    (folder / "cut").touch()
    if cell.fault == "cut for a while":
        time.sleep(PAUSE_SECONDS)
        ip("-n", namespace, "link", "set", interface, "up")
        (folder / "went-on").touch()
