"""Which backend carries gradients: that of the devices if they are alike, else Gloo; and a script's process group."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import training
from support.processes import results, run_workers
from support.training import Run

import evenstep
from evenstep.core.backends import common_backend
from evenstep.core.errors import ConfigError
from evenstep.torch.processes.join_workers import join_workers

pytestmark = pytest.mark.multiprocess

RUN = Run(samples=50, epochs=2, scripted=5)


def register(name, device):
    """A second backend, for a type of device; how often it was used comes back."""
    made = []

    def make(store, rank, size, timeout):
        made.append(rank)
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend(name, make, devices=[device])
    return made


def train_over(backends):
    """With the given default backend of the CPU on this worker: the weights, and whether the second one was used."""
    made = register("second", "cpu")
    dist.Backend.default_device_backend_map["cpu"] = backends[dist.get_rank()]
    return training.train(RUN)["weights"], len(made)


def use_toys(run):
    """Runs on a type of device that is not the CPU, on one worker and on all of them; and with a process group."""
    rank = dist.get_rank()
    torch.utils.rename_privateuse1_backend("toy")
    register("toyccl", "toy")
    said = []
    for kinds in (["cpu", "toy"], ["meta", "cpu"]):
        with pytest.raises(ConfigError) as raised:
            join_workers(torch.device(kinds[rank]), 30.0)
        said.append(str(raised.value))
    toys = join_workers(torch.device("toy"), 30.0)
    said.append(dist.get_backend(toys.device_group))
    toys.leave()
    return said


@pytest.mark.parametrize(("backends", "used"), [(["gloo", "second", "gloo"], 0), (["second"] * 3, 1)])
def test_backends_that_differ_go_through_gloo_and_equal_ones_are_used(backends, used):
    expected = training.train_alone(RUN, 15)
    for weights, made in results(run_workers(train_over, 3, backends)):
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-10)
        assert made == used


def test_devices_that_nothing_connects_are_refused_on_every_worker():
    first, second = results(run_workers(use_toys, 2, RUN))
    assert first == second
    assert first[0].startswith(
        "worker 1 cannot exchange gradients with the others: their devices differ (cpu, toy), so"
    )
    assert first[1].startswith("no communication backend is registered for the device type 'meta' of worker 0")
    assert first[2] == "toyccl"


def train_in_groups(run):
    """Two groups of two train side by side, twice; then all, by the group that has every process."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    training.train(replace(run, options={"process_group": pairs[rank % 2]}))
    inside = training.train(replace(run, seed=rank % 2, options={"process_group": pairs[rank % 2]}))
    assert dist.get_rank(pairs[rank % 2]) == rank // 2  # The group stays.
    together = training.train(replace(run, options={"process_group": dist.group.WORLD}))
    with pytest.raises(ConfigError, match="process_group does not go with 'asp', whose workers meet at the servers"):
        training.train(replace(run, scripted=None, scheme="asp", options={"process_group": dist.group.WORLD}))
    with pytest.raises(ConfigError, match=r"process_group must be a torch\.distributed\.ProcessGroup"):
        training.train(replace(run, options={"process_group": "WORLD"}))
    return inside["weights"], together["weights"]


def test_the_members_of_a_process_group_are_the_workers():
    values = results(run_workers(train_in_groups, 4, RUN))
    for rank, (inside, together) in enumerate(values):
        np.testing.assert_allclose(inside, training.train_alone(replace(RUN, seed=rank % 2), 10), rtol=0, atol=1e-10)
        np.testing.assert_allclose(together, training.train_alone(RUN, 20), rtol=0, atol=1e-10)


def test_one_backend_of_all_devices_is_kept_even_where_gloo_could_not_follow():
    assert common_backend(["hpu", "hpu"], ["hccl", "hccl"], ["cpu"]) == "hccl"
    with pytest.raises(evenstep.ConfigError, match=r"workers 0 and 1 cannot exchange .* \(hpu, xpu\)"):
        common_backend(["xpu", "hpu"], ["xccl", "hccl"], ["cpu"])
