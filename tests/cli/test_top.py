"""`evenstep top` in a real terminal, of a size that changes."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
from pathlib import Path

import pytest
from support.made_log import worker_events, write_log
from support.records import records

from evenstep.cli.main import main
from evenstep.report.live import LiveRun

FAST, SLOW = (0.001, 0.020, 0.001), (0.001, 0.080, 0.001)
PARTS = (FAST, FAST, SLOW)


class Terminal:
    """`evenstep top` with these arguments in a terminal of its own."""

    def __init__(self, *arguments, rows=24, columns=100):
        self.pid, self._end = pty.fork()
        if self.pid == 0:
            os.execve(
                sys.executable, [sys.executable, "-m", "evenstep.cli.main", "top", *arguments], self.environment()
            )
        self.resize(rows, columns)
        self._seen = ""

    @staticmethod
    def environment():
        sizes = ("COLUMNS", "LINES")
        return {**{name: value for name, value in os.environ.items() if name not in sizes}, "TERM": "xterm-256color"}

    def resize(self, rows, columns):
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def wait_for(self, pattern):
        """Until a frame that begins from now on shows this; the frame's text."""
        self._seen = ""
        while True:
            select.select([self._end], [], [])
            self._seen += os.read(self._end, 65536).decode(errors="replace")
            for frame in self._seen.split("\x1b[H")[1:]:
                text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame).replace("\r", "")
                if re.search(pattern, text):
                    return text

    def interrupt(self):
        """Ctrl-C; what stays on the screen, and the exit code."""
        os.kill(self.pid, signal.SIGINT)
        return self.end()

    def end(self):
        """What stays on the screen when it has ended, and the exit code."""
        rest = b""
        while True:
            try:
                data = os.read(self._end, 65536)
            except OSError:  # The other end is closed.
                break
            if not data:
                break
            rest += data
        os.close(self._end)
        _, status = os.waitpid(self.pid, 0)
        return rest.decode(errors="replace"), os.waitstatus_to_exitcode(status)


@pytest.mark.multiprocess
def test_it_shows_a_run_that_grows_and_heeds_the_terminals_size(tmp_path, monkeypatch):
    streams = [worker_events(worker, parts=PARTS, sizes=[(10, 10, 10)] * 40) for worker in range(3)]

    def grow(lines):
        for worker, stream in enumerate(streams):
            with Path("run", f"worker-{worker}.jsonl").open("a") as file:
                file.writelines(json.dumps(next(stream)) + "\n" for _ in range(lines))

    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    terminal = Terminal("run")  # A long name would take several lines.
    terminal.wait_for("waiting for the first iteration")
    grow(23)
    terminal.wait_for(r"iteration 21 ")
    # It may have looked while the lines of some workers were still to come.
    frame = terminal.wait_for("Worker 2 computes 4x slower")
    waits = {int(line.split()[0]): line.split()[5] for line in frame.splitlines() if re.match(r" [0-2] ", line)}
    assert waits == {0: "69%", 1: "69%", 2: "0%"}
    grow(10)
    terminal.wait_for(r"iteration 31 ")
    terminal.resize(24, 70)
    frame = terminal.wait_for(r"samples/s")
    while max(map(len, frame.splitlines())) > 70:  # A frame that was drawn before it heard of the new size.
        frame = terminal.wait_for(r"samples/s")
    last, code = terminal.interrupt()
    assert code == 0
    assert "Worker 2 computes 4x slower" in last


def test_without_a_terminal_it_prints_how_things_are(tmp_path, capsys):
    write_log(tmp_path, PARTS, sizes=[(10, 10, 10)] * 20)
    assert main(["top", str(tmp_path)]) == 0
    assert "Worker 2 computes 4x slower" in capsys.readouterr().out.replace("\n", " ")
    assert main(["top", str(tmp_path), "--json"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert [worker["recent"]["parts"]["waiting"] for worker in view["workers"]] == pytest.approx([60 / 87, 60 / 87, 0])


def test_a_worker_that_is_no_longer_heard_of_is_called_silent():
    live = LiveRun()
    for worker in range(3):
        for event in records(worker_events(worker, parts=PARTS)):
            live.take(event, 10.0 if worker else 0.0)
    assert [each.state for each in live.view(12.0).workers] == ["silent 12 s", "training", "training"]
    live.take(
        *records([{"event": "leave", "at": 1.0, "version": 1, "worker": 1, "why": "was killed by SIGKILL"}]), 12.0
    )
    view = live.view(12.0)
    assert view.workers[1].state == "gone"
    assert view.latest == ("worker 1 was killed by SIGKILL",)


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ("nowhere", "there is no folder nowhere"),
        (".", "no finished iteration yet"),
    ],
)
def test_mistakes_are_one_sentence(arguments, fragment, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["top", *arguments.split()]) == 2
    assert fragment in capsys.readouterr().err
