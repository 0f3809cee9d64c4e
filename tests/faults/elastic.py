"""Runs cells of elastic runs, and looks what came of them."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from support.elastic import alone, alone_locally
from support.guard import GUARD_SECONDS
from support.hosts import two_hosts

from faults import elastic_worker, worker
from faults.elastic_cells import COUNT, HEARTBEAT_SECONDS, HOST, PERIOD
from faults.elastic_worker import POLL_SECONDS, RUN, STEP
from faults.grid import PAUSE_SECONDS, cut, marked, wait_for

_PORT = 29511


@dataclass
class Outcome:
    """What came of a cell.

    Attributes:
        fired: When the fault took place, by victim.
        steps: What each replica recorded of each step, also of those that did not count.
        finished: The epochs and the weights of the replicas that came to the end.
        codes: The exit codes of the launchers; None for one that had to be killed.
        terminal: What the launchers wrote.
        left: Processes and files that were left behind.
    """

    fired: dict = field(default_factory=dict)
    steps: list = field(default_factory=list)
    finished: dict = field(default_factory=dict)
    codes: list = field(default_factory=list)
    terminal: str = ""
    left: list = field(default_factory=list)

    def seconds(self, cell):
        """From the fault to the next step that counted, after those which the victim had taken or was about to."""
        at, taken = max(self.fired.values()), {"commit": STEP, "mid-epoch": STEP - 1}.get(cell.moment, -1)
        return (
            min(line["at"] for line in self.steps if line["counted"] and line["at"] > at and line["step"] > taken) - at
        )


def run_cell(cell, folder):
    outcome = Outcome()
    (folder / "tmp").mkdir()
    mark = secrets.token_hex(8)
    environment = {**os.environ, "TMPDIR": str(folder / "tmp"), worker.MARK: mark, "OMP_NUM_THREADS": "1"}
    if cell.hosts == 1:
        options = ["--elastic", f"1:{COUNT}", "--nproc-per-replica", str(cell.processes)]
        command = [*_command(cell, folder), *options, *_script(cell, folder)]
        _follow(cell, folder, [_start(command, environment, folder)], outcome)
    else:
        with two_hosts() as hosts:
            _run_on_two_hosts(cell, folder, hosts, environment, outcome)
    outcome.terminal = "".join(path.read_text() for path in sorted(folder.glob("terminal-*")))
    outcome.left += marked(mark)
    if cell.victim != HOST:  # A launcher that is killed leaves its folders.
        outcome.left += [str(path) for path in (folder / "tmp").iterdir() if not path.name.startswith("torch")]
    outcome.fired = {path.name.partition("-")[2]: path.stat().st_mtime for path in folder.glob("fired-*")}
    for path in folder.glob("steps-*"):
        outcome.steps += [json.loads(line) for line in path.read_text().splitlines()]
    outcome.finished = {path.name.partition("-")[2]: json.loads(path.read_text()) for path in folder.glob("finished-*")}
    return outcome


def _command(cell, folder):
    options = ["--timeout", str(cell.timeout_seconds), "--heartbeat", str(HEARTBEAT_SECONDS)]
    return [sys.executable, "-m", "evenstep.cli.main", "run", *options]


def _script(cell, folder):
    return [elastic_worker.__file__, json.dumps(asdict(cell)), str(folder)]


def _start(command, environment, folder):
    terminal = folder / f"terminal-{len(list(folder.glob('terminal-*')))}"
    with terminal.open("wb") as file:
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )


def _follow(cell, folder, launchers, outcome):
    ends = time.monotonic() + GUARD_SECONDS
    while time.monotonic() < ends and any(each.poll() is None for each in launchers):
        if cell.fault == "paused" and not (folder / "went-on").exists():
            for fired in folder.glob("fired-[0-9]*"):
                if time.time() - fired.stat().st_mtime >= PAUSE_SECONDS:
                    os.kill(int(fired.read_text()), signal.SIGCONT)
                    (folder / "went-on").touch()
        time.sleep(POLL_SECONDS)
    outcome.codes += [each.poll() for each in launchers]
    for each in launchers:
        each.kill()
        each.wait()


def check(cell, outcome):
    """What is wrong with an outcome, as sentences."""
    wrong = [] if len(outcome.fired) == len(cell.victims) else [f"fired: {outcome.fired}"]
    wrong += [] if outcome.codes == cell.codes else [f"the launchers ended with {outcome.codes}"]
    wrong += [] if len(outcome.finished) == cell.members else [f"finished: {sorted(outcome.finished)}"]
    named = [int(each) for each in outcome.fired if each.isdecimal()]
    for each in named:
        name = f"(worker|replica) {each},? {f'.*rank {cell.rank} ' if cell.split and cell.fault != 'stopped' else ''}"
        if not re.search(rf"evenstep: {name}.*{re.escape(cell.why)}" if cell.why else "", outcome.terminal):
            wrong.append(f"worker {each} is not named with the reason")
    wrong += _check_steps(outcome)
    if cell.moment == PERIOD:
        counted = [line for line in outcome.steps if line["counted"]]
        references = alone_locally(replace(RUN, options={"scheme": cell.scheme}), counted)
    else:
        references = alone(replace(RUN, epochs=max((each["epochs"] for each in outcome.finished.values()), default=1)))
    for name, found in outcome.finished.items():
        weights = torch.tensor(found["weights"], dtype=torch.float64)
        least = min(float((weights - each).abs().max()) for each in references)
        wrong += [] if least < 1e-10 else [f"replica {name} is {least} from one process"]
    return wrong + [f"left behind: {each}" for each in outcome.left]


def _check_steps(outcome):
    """Each slice counted once, in sizes on which all agreed, and each replica lost at most the step in flight."""
    wrong, by_step, lost, whole = [], defaultdict(list), defaultdict(int), RUN.samples // RUN.global_batch_size
    for line in outcome.steps:
        step = line["epoch"] * whole + line["iteration"]
        if line["counted"]:
            by_step[step].append(line)
        else:
            lost[line["slot"], step] += 1
    if sorted(by_step) != list(range(len(by_step))):
        wrong.append("steps are missing")
    for step, lines in by_step.items():
        positions = [position for line in lines for position in line["positions"]]
        start = step % whole * RUN.global_batch_size
        same = all(line["sizes"] == lines[0]["sizes"] for line in lines)
        complete = sorted(positions) == list(range(start, start + RUN.global_batch_size))
        if not same or len(set(positions)) < len(positions) or (len(lines) == len(lines[0]["sizes"]) and not complete):
            wrong.append(f"step {step} did not count each sample of its slice once: {lines}")
    return wrong + [
        f"replica {slot} lost step {step} {times} times" for (slot, step), times in lost.items() if times > 1
    ]


# On two hosts.


def _run_on_two_hosts(cell, folder, hosts, environment, outcome):
    names = Path("/etc/netns")
    addresses = "127.0.0.1 localhost\n" + "".join(f"{address} {namespace}\n" for namespace, _, address in hosts)
    launchers = []

    def start(number):
        namespace, interface, _ = hosts[number]
        inside = ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", f'hostname {namespace}; exec "$@"']
        options = ["--elastic", f"1:{COUNT}", "--lighthouse", f"http://{hosts[0][0]}:{_PORT}"]
        command = [*_command(cell, folder), *options, "--workers", str(2 - number), *_script(cell, folder)]
        own = {**environment, "TEST_HOST": str(number), "GLOO_SOCKET_IFNAME": interface}
        launchers.append(_start([*inside, "sh", *command], own, folder))

    try:
        for namespace, _, _ in hosts:
            (names / namespace).mkdir(parents=True)
            (names / namespace / "hosts").write_text(addresses)
        start(0)
        start(1)
        if cell.victim == HOST:
            wait_for(folder / f"fired-{HOST}")
            launchers[0].kill()
            launchers.pop(0).wait()
            start(0)
        else:
            cut(cell, folder, hosts[1])
        _follow(cell, folder, launchers, outcome)
    finally:
        for namespace, _, _ in hosts:
            (names / namespace / "hosts").unlink(missing_ok=True)
            (names / namespace).rmdir()
