"""What messages and sums cost."""

import pytest

from evenstep.cluster import parse_cluster
from evenstep.sim.network import Network

LINKS = """
[links.lan]
bandwidth = "800 Mbit/s"
latency = "1 ms"
[links.fast]
bandwidth = "8 Gbit/s"
latency = "0.5 ms"
[hosts.a]
link = "lan"
[hosts.b]
link = "lan"
[hosts.s]
link = "fast"
[devices.d]
per_sample = "1 ms"
"""
MEGABYTE = 10**6  # 10 ms on lan, 1 ms on fast


def network(workers, servers=(), *, count=1, size=MEGABYTE):
    text = LINKS + "".join(f'[[workers]]\ndevice = "d"\n{each}\n' for each in workers)
    text += "".join(f'[[servers]]\nhost = "{each}"\n' for each in servers)
    return Network(parse_cluster(text), message_bytes=size, servers=count)


def test_a_message_takes_the_slower_link_and_both_latencies():
    one = network(['host = "a"'], ["s"])
    assert one.push_arrives(0, 5.0) == pytest.approx(5.0 + 0.010 + 0.0015)
    assert one.pull_arrives(0, 5.0) == pytest.approx(5.0 + 0.010 + 0.0015)


def test_workers_of_a_host_share_its_link_one_after_another():
    both = network(['host = "a"', 'host = "a"', 'host = "b"'], ["s"])
    arrivals = [both.push_arrives(worker, 0.0) for worker in range(3)]
    assert arrivals == pytest.approx([0.0115, 0.0215, 0.0115])


def test_a_server_s_link_is_shared_by_all_that_use_it():
    each_its_own = network(['link = "fast"'] * 4, ["s"])
    arrivals = [each_its_own.push_arrives(worker, 0.0) for worker in range(4)]
    assert arrivals == pytest.approx([0.002, 0.003, 0.004, 0.005])
    # The other direction is a link of its own, and both are free again later.
    assert each_its_own.pull_arrives(0, 0.0) == pytest.approx(0.002)
    assert each_its_own.push_arrives(0, 1.0) == pytest.approx(1.002)


def test_a_slow_sender_does_not_take_the_server_s_link_from_others():
    mixed = network(['link = "lan"', 'link = "fast"'], ["s"])
    assert mixed.push_arrives(0, 0.0) == pytest.approx(0.0115)
    assert mixed.push_arrives(1, 0.0) == pytest.approx(0.002 + 0.001)


def test_several_servers_have_a_part_each_and_the_last_one_counts():
    spread = network(['link = "lan"', 'link = "fast"'], ["a", "s"], count=2)
    assert spread.push_arrives(1, 0.0) == pytest.approx(0.005 + 0.0015)
    again = network(['link = "fast"'], ["s"], count=2)  # both on the same host
    assert again.push_arrives(0, 0.0) == pytest.approx(0.001 + 0.001)


def test_within_a_host_and_without_links_messages_are_free():
    assert network(['host = "s"'], ["s"]).free
    assert network(['host = "s"'], ["s"]).push_arrives(0, 3.0) == 3.0
    assert network([""], []).free
    assert not network([""], ["s"]).free
    assert network([""], ["s"]).push_arrives(0, 3.0) == pytest.approx(3.0 + 0.001 + 0.0005)
    assert network(['link = "fast"'], []).push_arrives(0, 3.0) == pytest.approx(3.0 + 0.001 + 0.0005)


def test_a_ring_passes_each_byte_almost_twice_over_the_slowest_link():
    ring = network(['host = "a"', 'host = "a"', 'host = "b"', 'host = "s"'])
    assert ring.all_reduce_seconds("ring") == pytest.approx(6 * (0.010 / 4 + 0.002))
    assert ring.all_reduce_seconds("tree") == pytest.approx(2 * 2 * (0.010 + 0.002))
    assert ring.small_exchange_seconds() == pytest.approx(4 * 0.002)


def test_sums_within_a_host_or_without_links_are_free():
    for workers in (['host = "a"'] * 3, ["", "", ""]):
        assert network(workers).all_reduce_seconds("ring") == 0.0
        assert network(workers).all_reduce_seconds("tree") == 0.0
        assert network(workers).small_exchange_seconds() == 0.0


def test_if_hosts_sum_first_each_sends_as_one_worker():
    pairs = network(['host = "a"'] * 2 + ['host = "b"'] * 2)
    assert pairs.all_reduce_seconds("ring", by_host=True) == pytest.approx(2 * (0.010 / 2 + 0.002))
    assert pairs.all_reduce_seconds("ring", by_host=True, narrowing=0.5) == pytest.approx(2 * (0.005 / 2 + 0.002))
