"""Two hosts on one machine: network namespaces, joined by a cable of a given speed. Needs root."""

import os
import secrets
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PORT = 29500
"""Of the first host's rendezvous: the namespace is a run's own."""


@dataclass(frozen=True)
class Host:
    """A host, its address, and the end of the cable there."""

    name: str
    address: str
    interface: str

    def command(self, *words):
        """The command that runs these words on this host, whose name is the host's name there."""
        named = 'hostname "$0" && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c", named, self.name, *words]


@contextmanager
def two_hosts(megabits=None):
    """Two `Host`s; a cable carries so many Mbit/s in each direction, as much as it can if None."""
    hosts = [Host(f"evenstep-{os.getpid()}-{n}", f"10.213.8.{n + 1}", f"eb{os.getpid() % 100000}{n}") for n in range(2)]
    for host in hosts:
        _ip("netns", "add", host.name)
    try:
        one, other = hosts
        _ip(
            "link",
            "add",
            one.interface,
            "netns",
            one.name,
            "type",
            "veth",
            "peer",
            other.interface,
            "netns",
            other.name,
        )
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip("-n", host.name, "link", "set", host.interface, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
            if megabits is not None:
                limit = ["tbf", "rate", f"{megabits}mbit", "burst", "256kb", "latency", "100ms"]
                _run("tc", "-n", host.name, "qdisc", "add", "dev", host.interface, "root", *limit)
        yield hosts
    finally:
        for host in hosts:
            _ip("netns", "del", host.name)


def run_workers(hosts, workers, words, seconds):
    """Run a script and its words on so many workers, as many on each host, by torchrun; raises if one fails."""
    started = []
    try:
        for node, host in enumerate(hosts):
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts))]
            torchrun += ["--node-rank", str(node), "--nproc-per-node", str(workers // len(hosts))]
            torchrun += ["--master-addr", hosts[0].address, "--master-port", str(PORT), *words]
            environment = os.environ | {
                "EVENSTEP_SECRET": _SECRET, "GLOO_SOCKET_IFNAME": host.interface, "HOST_ADDRESS": host.address,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.getenv("PYTHONPATH")])),
            }  # fmt: skip
            started.append(subprocess.Popen(host.command(*torchrun), env=environment, stdin=subprocess.DEVNULL))
        for each in started:
            if each.wait(seconds):
                raise RuntimeError(f"{' '.join(words)} ended with {each.returncode}")
    finally:
        for each in started:
            each.kill()
            each.wait()


def _ip(*words):
    _run("ip", *words)


def _run(*words):
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


_SECRET = secrets.token_hex(32)
