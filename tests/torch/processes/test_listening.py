"""A run on one host listens on loopback alone."""

import json
import os
import socket
from pathlib import Path

import psutil
import pytest
from support import faults
from support.hosts import may_name_hosts
from support.started import Started, evenstep

from evenstep.launch.one_host import OneHost
from evenstep.torch.processes.meeting_place import meet

SCRIPT = Path(faults.__file__).with_name("listening.py")


def addresses_of_this_host():
    """Those by which other hosts may reach it."""
    found = [each.address for several in psutil.net_if_addrs().values() for each in several if each.family == 2]
    return [each for each in found if not each.startswith("127.")]


def run_under_a_name_that_others_know(*words):
    """`evenstep run` on a host whose name has an address of the network, where that can be arranged."""
    others = addresses_of_this_host()
    if others and may_name_hosts():
        socket.sethostname(others[0])
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    return evenstep("run", *words)


@pytest.mark.multiprocess
@pytest.mark.parametrize("scheme", ["bsp", "ssp:bound=1,servers=2"])
def test_a_run_on_one_host_is_reached_from_there_alone(scheme, tmp_path):
    words = ("--workers", 2, "--max-restarts", 1, "--scheme", scheme, SCRIPT, tmp_path / "listening.json")
    with Started(run_under_a_name_that_others_know, *words) as launcher:
        _, error = launcher.communicate()
    assert launcher.returncode == 0, error
    found = json.loads((tmp_path / "listening.json").read_text())
    # The store, and what the scheme has: the sockets of both workers, or those of both servers.
    assert len(found) >= 3
    assert {address for address, _ in found} == {"127.0.0.1"}


def test_each_start_of_the_workers_has_a_store_without_what_those_before_it_left():
    starts = OneHost("a run")
    first, second = starts.next_rendezvous(), starts.next_rendezvous()
    first.store.set("address of worker 1", "somewhere")
    assert not second.store.check(["address of worker 1"])
    assert first.bootstrap_store_info.master_port != second.bootstrap_store_info.master_port


def test_a_worker_keeps_a_store_at_a_loopback_address_for_this_host_alone():
    place = faults.meeting_place()
    kept = [meet(0, 1, 30.0, place)[0], meet(0, 1, 30.0, place)[0]]
    port = int(place["MASTER_PORT"])
    sockets = psutil.Process().net_connections("tcp")
    listening = [each for each in sockets if each.status == psutil.CONN_LISTEN and each.laddr.port == port]
    assert [each.laddr.ip for each in listening] == ["127.0.0.1"]
    for address in addresses_of_this_host():
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address, port), timeout=30)
    del kept
