"""Groups that are the workers of two hosts, which are network namespaces; the servers start as under torchrun."""

import os
import secrets

import pytest
import torch
from support.hosts import enter, sent_bytes, two_hosts
from support.processes import results, run_workers
from support.served import server_events
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.launch.server_settings import SECRET_VARIABLE

pytestmark = [pytest.mark.multiprocess, pytest.mark.netns]

WORKERS = 4
WIDE = 2**17
NBYTES = 4 * WIDE
"""Of a message: the weights, or a gradient."""
PUSHES = 12
"""Of each worker."""


@pytest.fixture
def hosts():
    with two_hosts() as made:
        yield made


def train(hosts, scheme, run_dir):
    """What the weights are after each step, and at the end."""
    rank = int(os.environ["RANK"])
    enter(hosts[rank // 2])
    torch.manual_seed(1)
    model = torch.nn.Linear(WIDE, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    inputs = torch.randn(WORKERS * PUSHES, WIDE, generator=torch.Generator().manual_seed(2))
    loader = DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=1)
    # One host's servers and the other's workers may take a while to start.
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme=scheme, run_dir=run_dir, timeout=60.0)
    seen = []
    for each, target in loader:
        loss = torch.nn.functional.mse_loss(model(each), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(float(model.module.weight.detach().double().sum()))
    ended = float(model.module.weight.detach().double().sum())
    loader.close()
    return seen, ended


@pytest.mark.parametrize(("period", "pushes"), [("", PUSHES), (",period=3", PUSHES // 3)])
def test_heavy_traffic_crosses_the_network_once_for_each_group(hosts, tmp_path, period, pushes):
    environment = {
        "MASTER_ADDR": hosts[0][2],
        "MASTER_PORT": "29400",
        "LOCAL_WORLD_SIZE": "2",
        SECRET_VARIABLE: secrets.token_hex(32),
    }
    before = [sent_bytes(host) for host in hosts]
    scheme = f"grouped:groups=hosts,across=bsp{period}"
    values = results(run_workers(train, WORKERS, hosts, scheme, tmp_path, environment=environment))
    seen, ended = zip(*values, strict=True)
    # Within a host, and behind a barrier across them too, all have the same weights at each release.
    assert len(set(ended)) == 1
    assert period or seen[0] == seen[1] == seen[2] == seen[3]
    assert sum(map(len, seen)) == PUSHES * WORKERS
    (regroup,) = server_events(tmp_path, "regroup")
    assert regroup.groups == [[0, 1], [2, 3]]
    down, up = (sent_bytes(host) - start for host, start in zip(hosts, before, strict=True))
    # Without a group server, what two workers push and pull. The last periods are shorter, so that there are more.
    assert all(pushes <= crossed / NBYTES < 1.5 * pushes + 2 for crossed in (down, up))
