"""What is said of hosts that do not fit together."""

import pytest
from msgspec.structs import replace

from evenstep.advice.hosts import HostFacts, hosts_of, warnings

FOUND = {"evenstep": "1.0", "python": "3.12.1", "torch": "2.13.0", "numpy": "2.4.0", "cuda": "none"}


def host(name="a", *, node=0, workers=(0,), devices=("cpu",), processors=4, secret=None, **found):
    return HostFacts(
        name=name, node=node, workers=list(workers), devices=list(devices), processors=processors, interfaces=[],
        secret=secret, found=FOUND | found,
    )  # fmt: skip


def test_hosts_that_fit_together_have_nothing_to_change():
    assert not list(warnings([host("a"), host("b")]))
    assert not list(warnings([host("a", secret="x"), host("b", secret="x")]))


@pytest.mark.parametrize(
    ("hosts", "told"),
    [
        ([host("a"), host("b", torch="2.12.0"), host("c")], "torch is 2.13.0 on a, c and 2.12.0 on b"),
        ([host("a", workers=(0, 1, 2), devices=["cpu"] * 3, processors=2)], "3 workers on 2 processors"),
        ([host("a", secret="x"), host("b")], "not set on b"),
        ([host("a", secret="x"), host("b", secret="y")], "differs between hosts"),
    ],
)
def test_each_thing_to_change_is_one_sentence(hosts, told):
    (sentence,) = warnings(hosts)
    assert told in sentence


def test_a_gpu_for_each_worker_needs_no_processor_for_each():
    assert not list(warnings([host(workers=range(8), devices=["GPU"] * 8, processors=2)]))


def test_workers_of_a_node_make_one_host_and_hosts_of_one_name_are_told_apart():
    second = replace(host("a", workers=(1,), devices=["GPU"]), found={})
    told = [host("a", workers=(0,)), second, host("a", node=1, workers=(2,), torch="2.12.0")]
    first, second = hosts_of(told)
    assert (first.name, first.workers, first.devices) == ("a (node 0)", [0, 1], ["cpu", "GPU"])
    assert (second.name, second.found["torch"]) == ("a (node 1)", "2.12.0")
