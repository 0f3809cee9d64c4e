"""Two hosts, laid out as network namespaces, under torchrun --nnodes 2."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import training
from support.guard import GUARD_SECONDS
from support.hosts import two_hosts
from support.training import Run

pytestmark = [pytest.mark.multiprocess, pytest.mark.netns]

SCRIPT = Path(training.__file__).with_name("two_hosts.py")


@pytest.fixture
def hosts():
    """Two namespaces joined by a cable: [(namespace, interface, address)]."""
    with two_hosts() as made:
        yield made


def test_two_hosts_follow_the_trajectory_of_one_process(hosts, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    # The port is free: the namespace is this test's own.
    rendezvous = ["--master-addr", hosts[0][2], "--master-port", "29400"]
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", namespace, *torchrun, *rendezvous, "--node-rank", str(n), SCRIPT, tmp_path],
            env={**os.environ, "GLOO_SOCKET_IFNAME": interface, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for n, (namespace, interface, _) in enumerate(hosts)
    ]
    try:
        printed = [process.communicate(timeout=GUARD_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)
    values = [json.loads((tmp_path / f"worker-{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]
    expected = training.train_alone(Run(samples=82, epochs=2), 20)
    for value in values:
        np.testing.assert_allclose(value["weights"], expected, rtol=0, atol=1e-10)
    assert len({json.dumps(value["sizes"]) for value in values}) == 1
