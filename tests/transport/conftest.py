"""Every kind of connection, and a look at what the tests left open."""

import gc
import os
import threading

import pytest
from support.in_memory import connected_pair
from support.served import outer_host

from evenstep.transport.connect import connect
from evenstep.transport.listen import listen

SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def no_descriptor_and_no_thread_is_left():
    threads = set(threading.enumerate())
    descriptors = open_descriptors()
    yield
    if not open_descriptors() <= descriptors:
        gc.collect()  # What nobody refers to any more may be closed only then.
    assert set(threading.enumerate()) <= threads
    assert open_descriptors() <= descriptors


def open_descriptors():
    """Each open descriptor and what it stands for; the one that lists them is closed before it is looked at."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.add((descriptor, os.readlink(f"/proc/self/fd/{descriptor}")))
        except FileNotFoundError:
            continue
    return found


@pytest.fixture
def secret():
    return SECRET


@pytest.fixture
def host_of():
    """The host on which a listener offers a scheme: encryption begins beyond loopback."""

    def host_of(scheme):
        return outer_host() if scheme == "tls" else "127.0.0.1"

    return host_of


@pytest.fixture
def connected(host_of):
    """Makes the two ends of a new connection of a kind: client, server."""
    made = []

    def connected(kind, **options):
        if kind == "memory":
            made.extend(connected_pair(**options))
            return made[-2], made[-1]
        with listen(host_of(kind), secret=SECRET, **options) as listener:
            addresses = [address for address in listener.addresses if address.startswith(kind)]
            made.append(connect(addresses, secret=SECRET))
            made.append(listener.accept())
            return made[-2], made[-1]

    yield connected
    for connection in made:
        connection.close()
