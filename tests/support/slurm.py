"""A Slurm cluster on one machine: its real daemons, with a network namespace as each node."""

import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from support.guard import GUARD_SECONDS
from support.hosts import enter, two_hosts
from support.started import Started

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={nodes[0][0]}({nodes[0][2]})
SlurmUser=root
AuthInfo=socket={folder}/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdParameters=config_overrides
MpiDefault=none
JobRequeue=0
GresTypes=gpu
NodeName={nodes[0][0]} NodeAddr={nodes[0][2]} CPUs=8 Gres=gpu:2 Feature=fast
NodeName={nodes[1][0]} NodeAddr={nodes[1][2]} CPUs=8 Gres=gpu:2 Feature=slow
PartitionName=all Nodes=ALL Default=YES
"""


class Cluster:
    """Two nodes with two GPUs each, as far as Slurm knows: the first has the feature `fast`, the other `slow`."""

    def __init__(self, folder, nodes):
        self._folder, self._nodes = folder, nodes

    def started(self, node, *words, **environment):
        """A program that runs on a node, where the names of all nodes are known."""
        environment["SLURM_CONF"] = str(self._folder / "slurm.conf")
        bound = ["sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(self._folder / "hosts"), *words]
        return Started(_on, self._nodes[node], ["unshare", "--mount", *bound], environment=environment)

    def submit(self, *words, **environment):
        """`sbatch WORDS`, which waits for the end of the job."""
        return self.started(0, "sbatch", "--wait", "--quiet", *words, **environment)


def _on(host, words):
    enter(host)
    os.execvp(words[0], words)


@contextmanager
def slurm():
    """A cluster whose controller runs; jobs wait for their nodes."""
    for program in ("munged", "slurmctld", "slurmd"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program} here (Debian: apt install slurmctld slurmd munge)")
    with two_hosts() as nodes, ExitStack() as stack:
        # Not pytest's, whose paths are too long for the names of sockets.
        folder = Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))
        (folder / "state").mkdir()
        (folder / "munge").mkdir(mode=0o700)
        for name in ("gpu0", "gpu1", "munge/key"):
            (folder / name).touch(mode=0o600)
        (folder / "munge/key").write_bytes(os.urandom(1024))
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, nodes=nodes), encoding="utf-8")
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-1]\n", encoding="utf-8")
        names = "".join(f"{address} {name}\n" for name, _, address in nodes)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}", encoding="utf-8")
        files = ("socket", "key-file", "pid-file", "log-file", "seed-file")
        munged = ["munged", "--force", *(f"--{each}={folder}/munge/{each.removesuffix('-file')}" for each in files)]
        subprocess.run(munged, check=True, timeout=GUARD_SECONDS)
        stack.callback(subprocess.run, ["munged", "--stop", f"--socket={folder}/munge/socket"], timeout=GUARD_SECONDS)
        cluster = Cluster(folder, nodes)
        controller = stack.enter_context(cluster.started(0, "slurmctld", "-D"))
        said = []
        for line in controller.stderr:
            said.append(line)
            if "Running as primary controller" in line:
                break
        else:
            raise AssertionError("".join(said))
        for node in range(2):
            stack.enter_context(cluster.started(node, "slurmd", "-D"))
        yield cluster
