"""A real SuperLink and real SuperNodes, each a process on this machine, and runs of the example's app on them."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

import evenstep
from support.frameworks.start import free_port
from support.guard import GUARD_SECONDS

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower"
BIN = Path(sys.executable).parent

# In the place of the example's ClientApp: the same, with the faults that the node's config names.
FAULTY = """
import os, signal, time
from pathlib import Path
import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.clientapp import ClientApp
from evenstep.integrations.flower import SECONDS, measured
from evenstep_flower.client_app import train

def faulty(message, context, call_next):
    config, fault = context.node_config, context.node_config.get("fault", "")
    folder = Path(config["folder"])
    (folder / f"node-{config['partition-id']}").write_text(str(context.node_id))
    if fault == "stuck" and (folder / "stick").exists():
        (folder / "stuck").touch()
        signal.pause()
    reply = call_next(message, context)
    if fault == "nan":
        arrays = reply.content["arrays"]
        reply.content["arrays"] = ArrayRecord({k: Array(np.full_like(v.numpy(), np.nan)) for k, v in arrays.items()})
    if fault == "lie":
        reply.content["metrics"][SECONDS] = 1e9
    return reply

app = ClientApp(mods=[faulty, measured])
app.train()(train)
"""


_END = "<the end>"


class Federation:
    """A SuperLink with SuperNodes; `close` ends them all.

    Args:
        folder: For Flower's own files, the logs of all processes, and what the apps write.
        nodes: The config of each node beside its `partition-id`, which is its place in the list.
    """

    def __init__(self, folder, nodes):
        self.folder = folder
        self.port = free_port()
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        source = str(Path(evenstep.__file__).parents[1])
        self.environment = os.environ | {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": source,
        }
        self.processes = []
        self.start("flower-superlink", "--port", str(self.port), "--disable-runtime-dependency-installation")
        deadline = time.monotonic() + GUARD_SECONDS
        while not listens(self.port):
            assert time.monotonic() < deadline, "the SuperLink does not listen"
            time.sleep(0.05)
        self.nodes = [self.node(partition, config) for partition, config in enumerate(nodes)]

    def start(self, program, *arguments):
        """A process of Flower, in a session of its own."""
        log = (self.folder / f"{len(self.processes)}-{program}.log").open("wb")
        process = subprocess.Popen(
            [BIN / program, "--insecure", *arguments],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        log.close()
        self.processes.append(process)
        return process

    def node(self, partition, config):
        settings = {"partition-id": partition, "folder": f'"{self.folder}"'} | config
        said = " ".join(f"{name}={value}" for name, value in settings.items())
        link = f"127.0.0.1:{self.port}"
        return self.start("flower-supernode", "--superlink", link, "--port", str(free_port()), "--node-config", said)

    def id_of(self, partition):
        return int((self.folder / f"node-{partition}").read_text())

    def close(self):
        for process in self.processes:
            end(process)


def listens(port):
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def end(process):
    """Kill a process with all that it has started."""
    with suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
    process.wait()


class AppRun:
    """`flwr run` of an app: its log, line by line, as it comes."""

    def __init__(self, federation, app, **config):
        self.lines, self._changed = [], threading.Condition()
        said = " ".join(f"{name.replace('_', '-')}={value}" for name, value in config.items())
        command = [BIN / "flwr", "run", str(app), "--stream", "--run-config", said]
        self.process = subprocess.Popen(
            command,
            env=federation.environment,
            cwd=federation.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip())
                self._changed.notify_all()
        with self._changed:
            self.lines.append(_END)
            self._changed.notify_all()

    def wait_for(self, words):
        """Until a line has these words."""
        with self._changed:
            self._changed.wait_for(lambda: self._has(words) or self._has(_END), GUARD_SECONDS)
            came = self._has(words)
        assert came, f"no line with {words!r} in\n" + "\n".join(self.lines)

    def _has(self, words):
        return any(words in line for line in self.lines)

    def text(self):
        """The whole log, when the run is over."""
        try:
            self.wait_for(_END)
        finally:
            end(self.process)
            self._reader.join()
            self.process.stdout.close()
        return "\n".join(self.lines)


def until(path):
    """Wait until a process has written this file."""
    deadline = time.monotonic() + GUARD_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.05)


def faulty_app(folder):
    """The example with nodes that may fail."""
    for source in EXAMPLE.rglob("*"):
        if source.suffix in {".py", ".toml"}:
            target = folder / source.relative_to(EXAMPLE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.read_text().replace("client_app:app", "faulty:app"))
    (folder / "evenstep_flower" / "faulty.py").write_text(FAULTY)
    return folder
