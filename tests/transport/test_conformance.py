"""Every kind of connection and of listener keeps to the interface."""

import pytest
from support.faulty import Faulty, scripted
from support.in_memory import MemoryListener, connected_pair
from support.transport_checks import check_connection, check_listener

from evenstep.transport.connect import connect
from evenstep.transport.listen import listen


@pytest.mark.parametrize("kind", ["memory", "unix", "tcp", "tls"])
def test_a_connection_of_each_kind_keeps_to_the_interface(kind, connected):
    check_connection(lambda: connected(kind))


def test_a_faulty_connection_without_faults_keeps_to_the_interface():
    check_connection(lambda: tuple(Faulty(end, scripted({})) for end in connected_pair()))


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
def test_a_listener_of_each_kind_keeps_to_the_interface(kind, host_of, secret):
    def connect_to(listener):
        addresses = [address for address in listener.addresses if address.startswith(kind)]
        return connect(addresses, secret=secret)

    check_listener(lambda: listen(host_of(kind), secret=secret), connect_to)


def test_a_listener_in_memory_keeps_to_the_interface():
    check_listener(MemoryListener, MemoryListener.connect)
