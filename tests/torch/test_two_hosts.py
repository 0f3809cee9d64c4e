"""Two hosts, laid out as network namespaces, under torchrun --nnodes 2."""

import json
from pathlib import Path

import numpy as np
import pytest
from support import training
from support.hosts import enter, two_hosts
from support.started import Started, ended, torchrun
from support.training import Run

pytestmark = [pytest.mark.multiprocess, pytest.mark.netns]

SCRIPT = Path(training.__file__).with_name("two_hosts.py")


@pytest.fixture
def hosts():
    """Two namespaces joined by a cable: [(namespace, interface, address)]."""
    with two_hosts() as made:
        yield made


def torchrun_on(host, *words):
    enter(host)
    torchrun(*words)


def test_two_hosts_follow_the_trajectory_of_one_process(hosts, tmp_path):
    # The port is free: the namespace is this test's own.
    options = ("--nnodes", 2, "--nproc-per-node", 2, "--master-addr", hosts[0][2], "--master-port", 29400)
    agents = []
    for number, host in enumerate(hosts):
        words = (*options, "--node-rank", number, SCRIPT, tmp_path)
        environment = {"GLOO_SOCKET_IFNAME": host[1], "OMP_NUM_THREADS": "1"}
        agents.append(Started(torchrun_on, host, *words, environment=environment))
    codes, said = ended(agents)
    assert codes == [0, 0], said
    values = [json.loads((tmp_path / f"worker-{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]
    expected = training.train_alone(Run(samples=82, epochs=2), 20)
    for value in values:
        np.testing.assert_allclose(value["weights"], expected, rtol=0, atol=1e-10)
    assert len({json.dumps(value["sizes"]) for value in values}) == 1
