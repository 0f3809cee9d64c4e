"""Averages of models over two hosts, which are network namespaces: what they come to, and what crosses the cable."""

import os
from dataclasses import dataclass

import pytest
import torch
from support import training
from support.hosts import enter, sent_bytes, two_hosts
from support.processes import results, run_workers
from support.training import Run
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.schemes import Outer

pytestmark = [pytest.mark.multiprocess, pytest.mark.netns]

WIDE, MEETINGS, RUNS = 2**17, 8, 2
NBYTES = 4 * WIDE * MEETINGS * RUNS
LOCAL = {"local-sgd": None, "diloco": Outer()}


@pytest.fixture(scope="module")
def hosts():
    with two_hosts() as made:
        yield made


@dataclass
class OnHost:
    """A worker's work, done on its host; the first host has one worker more than the other."""

    hosts: list

    def __call__(self, work, *arguments):
        host = self.hosts[int(os.environ["RANK"]) // 2]
        enter(host)
        os.environ["GLOO_SOCKET_IFNAME"] = host[1]
        return work(*arguments)


def run_on(hosts, workers, work, *arguments):
    environment = {"MASTER_ADDR": hosts[0][2], "MASTER_PORT": "29400"}
    return results(run_workers(OnHost(hosts), workers, work, *arguments, environment=environment))


def local_run(outer):
    parts = {"period": 4} if outer is None else {"period": 4, "outer": outer}
    return Run(scripted=5, optimizer="momentum", parts=parts, samples=79, epochs=4)


def train_wide(scheme):
    return [run_wide(scheme) for _ in range(RUNS)][-1]


def run_wide(scheme):
    model = torch.nn.Linear(WIDE, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    inputs = torch.randn(4 * 2 * MEETINGS, WIDE, generator=torch.Generator().manual_seed(2))
    loader = DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=1)
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme=scheme, timeout=60.0)
    for each, target in loader:
        loss = torch.nn.functional.mse_loss(model(each), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loader.close()
    return model.module.weight.detach().tolist()


@pytest.mark.parametrize("name", LOCAL)
def test_sums_by_host_are_the_mathematics_of_one_process_with_a_model_per_worker(hosts, name):
    outer, options = LOCAL[name], None
    if outer is not None:
        options = {"lr": outer.rate, "momentum": outer.momentum, "nesterov": outer.nesterov}
    values = run_on(hosts, 3, training.train_locally, local_run(outer))
    expected = training.train_locally_alone(local_run(outer), [each["positions"] for each in values], 4, outer=options)
    for value in values:
        assert value["weights"] == values[0]["weights"]
        assert value["weights"] == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize(("wire", "part"), [("", 1.0), (",wire=int8", 0.254)])
def test_each_host_sends_its_sum_once(hosts, wire, part):
    before = [sent_bytes(host) for host in hosts]
    weights = run_on(hosts, 4, train_wide, f"diloco:period=2{wire}")
    assert weights[0] == weights[1] == weights[2] == weights[3]
    sent = [sent_bytes(host) - start for host, start in zip(hosts, before, strict=True)]
    # The first host also sends the model with which all begin, to each worker of the other. A ring sends 1.5 times.
    for host, own in enumerate(sent):
        assert part <= own / NBYTES < 1.1 * part + (0.3 if host == 0 else 0.05)
