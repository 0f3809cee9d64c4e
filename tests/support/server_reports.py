"""Receives what the stand-ins for server programs (stand_in_server.py) tell a test about themselves."""

import json
import socket
import sys
from pathlib import Path

from support.guard import GUARD_SECONDS


def stand_in(reports, behaviour="good"):
    """The server command that starts stand-ins."""
    script = Path(__file__).parent / "stand_in_server.py"
    return (sys.executable, str(script), str(reports.port), behaviour)


class Reports:
    """What the stand-ins say about themselves, one connection each."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(GUARD_SECONDS)
        self.port = self.listener.getsockname()[1]
        self.files = []

    def next(self):
        """The next process that has started: what it was told."""
        connection, _ = self.listener.accept()
        connection.settimeout(GUARD_SECONDS)
        file = connection.makefile("rw")
        connection.close()
        self.files.append(file)
        return Report(file)

    def close(self):
        for file in self.files:
            file.close()
        self.listener.close()


class Report:
    """One stand-in: what it was told, and what it says from then on."""

    def __init__(self, file):
        self.file = file
        self.started = json.loads(file.readline())
        self.told = self.started["told"]
        self.pid = self.started["pid"]

    def next(self):
        """The next thing that it says."""
        return json.loads(self.file.readline())

    def let_end(self):
        """Let it end, if it is slow."""
        self.file.write("\n")
        self.file.flush()

    def rest(self):
        """What it says until it is gone."""
        return [json.loads(line) for line in self.file]

    def after_listening(self):
        """What it says until it is gone, beside that it listens."""
        return [event for event in self.rest() if event["event"] != "listening"]
