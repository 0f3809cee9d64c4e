"""A real SuperLink and real SuperNodes, each a process on this machine, and runs of the example's app on them."""

import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil

import evenstep
from support.guard import GUARD_SECONDS
from support.ports import free_port

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

AT_SECOND = ("killed", "stopped", "hangs", "exits", "raises", "another-model", "NaN", "lies")

def faulty(message, context, call_next):
    config, fault = context.node_config, context.node_config.get("fault", "")
    folder = Path(config["folder"])
    (folder / f"node-{config['partition-id']}").write_text(str(context.node_id))
    if fault == "stuck" and (folder / "stuck").exists():
        if (folder / "trained").exists():
            (folder / "stuck").write_text("stuck")  # A pipe: this waits until the test reads it.
            signal.pause()
        (folder / "trained").touch()
    if fault in AT_SECOND:  # Whose times the server knows from the first.
        began = folder / "began"
        fault = fault if began.exists() else ""
        began.touch()
        if fault:
            (folder / "fired").touch()
    if fault in ("killed", "stopped"):
        number = signal.SIGKILL if fault == "killed" else signal.SIGSTOP
        os.kill(os.getppid(), number)
        os.kill(os.getpid(), number)
    if fault == "exits":
        os._exit(0)
    if fault == "hangs":
        signal.pause()
    if fault in ("crash", "raises"):
        raise RuntimeError("this app is broken")
    reply = call_next(message, context)
    arrays = reply.content["arrays"]
    if fault == "another-model":
        reply.content["arrays"] = ArrayRecord({k: Array(v.numpy()[:1]) for k, v in arrays.items()})
    if fault in ("nan", "NaN"):
        reply.content["arrays"] = ArrayRecord({k: Array(np.full_like(v.numpy(), np.nan)) for k, v in arrays.items()})
    if fault in ("lie", "lies"):
        reply.content["metrics"][SECONDS] = 1e9
    return reply

app = ClientApp(mods=[faulty, measured])
app.train()(train)
"""


_END = "<the end>"


class Federation:
    """A SuperLink with SuperNodes; `close` ends them all.

    Args:
        folder: For Flower's own files, the logs of the SuperNodes, and what the apps write.
        nodes: The config of each node beside its `partition-id`, which is its place in the list.
        simulated: How many nodes Flower's simulation engine has in the place of processes.
    """

    def __init__(self, folder, nodes=(), simulated=0):
        self.folder, self.simulated = folder, simulated
        self.port = free_port()
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        source = str(Path(evenstep.__file__).parents[1])
        self.environment = os.environ | {
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": source,
        }
        self.processes = []
        options = ["--port", str(self.port), "--disable-runtime-dependency-installation"]
        link = self.start(
            "flower-superlink", *options, *(["--simulation"] if simulated else []), stdout=subprocess.PIPE
        )
        self.link = Lines(link)
        try:
            self.link.wait_for("Uvicorn running")
        except AssertionError:
            self.close()
            raise
        self.nodes = [self.node(partition, config) for partition, config in enumerate(nodes)]

    def start(self, program, *arguments, stdout):
        """A process of Flower, in a session of its own."""
        process = subprocess.Popen(
            [BIN / program, "--insecure", *arguments],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def node(self, partition, config):
        settings = {"partition-id": partition, "folder": f'"{self.folder}"'} | config
        said = " ".join(f"{name}={value}" for name, value in settings.items())
        link = f"127.0.0.1:{self.port}"
        options = ["--superlink", link, "--port", str(free_port()), "--node-config", said]
        with (self.folder / f"{len(self.processes)}-supernode.log").open("wb") as log:
            return self.start("flower-supernode", *options, stdout=log)

    def id_of(self, partition):
        return int((self.folder / f"node-{partition}").read_text())

    def close(self):
        for process in self.processes:
            end(process)
        self.link.close()


def end(process):
    """Kill a process with all that it has started."""
    with suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
    process.wait()


class Lines:
    """What a process writes, line by line, as it comes."""

    def __init__(self, process):
        self.process = process
        self.lines, self._changed = [], threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self._note(line.decode().rstrip())
        self._note(_END)

    def _note(self, line):
        with self._changed:
            self.lines.append(line)
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
        """The whole output, when the process has ended."""
        try:
            self.wait_for(_END)
        finally:
            self.close()
        return "\n".join(self.lines)

    def close(self):
        """End the process."""
        end(self.process)
        self._reader.join()
        self.process.stdout.close()


def run_app(federation, app, **config):
    """`flwr run` of an app: what it writes."""
    said = " ".join(f"{name.replace('_', '-')}={value}" for name, value in config.items())
    command = [BIN / "flwr", "run", str(app), "--stream", "--run-config", said]
    if federation.simulated:
        command += ["--federation-config", f"num-supernodes={federation.simulated}"]
    process = subprocess.Popen(
        command,
        env=federation.environment,
        cwd=federation.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return Lines(process)


class Pipe:
    """A named pipe, into which a process writes when it is where the test waits for it."""

    def __init__(self, path):
        self.path = path
        os.mkfifo(path)
        self._end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def wait(self):
        """Until a process has written into it; no other finds it after that."""
        try:
            came, _, _ = select.select([self._end], [], [], GUARD_SECONDS)
            assert came, f"nothing came by {self.path}"
        finally:
            os.close(self._end)
            self.path.unlink()


def faulty_app(folder):
    """The example with nodes that may fail."""
    for source in EXAMPLE.rglob("*"):
        if source.suffix in {".py", ".toml"}:
            target = folder / source.relative_to(EXAMPLE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.read_text().replace("client_app:app", "faulty:app"))
    (folder / "evenstep_flower" / "faulty.py").write_text(FAULTY)
    return folder
