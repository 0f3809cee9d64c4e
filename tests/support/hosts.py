"""Hosts on one machine: network namespaces, joined by a cable whose traffic is counted."""

import ctypes
import json
import os
import socket
import subprocess
from contextlib import contextmanager

import pytest

_NEW_NAMES = 0x04000000
_NEW_NETWORK = 0x40000000


def ip(*arguments):
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL)


@contextmanager
def two_hosts():
    """Two namespaces joined by a cable: [(namespace, interface, address)]."""
    made = [(f"evenstep-{os.getpid()}-{n}", f"es{os.getpid() % 100000}{n}", f"10.213.7.{n + 1}") for n in range(2)]
    try:
        for namespace, _, _ in made:
            ip("netns", "add", namespace)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}")
    try:
        ip("link", "add", made[0][1], "netns", made[0][0], "type", "veth", "peer", made[1][1], "netns", made[1][0])
        for namespace, interface, address in made:
            ip("-n", namespace, "addr", "add", f"{address}/24", "dev", interface)
            ip("-n", namespace, "link", "set", interface, "up")
            ip("-n", namespace, "link", "set", "lo", "up")
        yield made
    finally:
        for namespace, _, _ in made:
            ip("netns", "del", namespace)


def may_name_hosts():
    """Have this process on a host whose name it may change without anybody else's noticing; False where it cannot."""
    return not ctypes.CDLL(None).unshare(_NEW_NAMES)


def enter(host):
    """This process is on that host from now on, whose name is its namespace's; so are those that it starts."""
    namespace, _, _ = host
    system = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", encoding="utf-8") as file:
        done = not system.setns(file.fileno(), _NEW_NETWORK) and not system.unshare(_NEW_NAMES)
    if not done:
        raise OSError(ctypes.get_errno(), "cannot enter the namespace")
    socket.sethostname(namespace)


def sent_bytes(host):
    """What has left this host by its cable so far."""
    namespace, interface, _ = host
    (link,) = json.loads(ip("-n", namespace, "-s", "-j", "link", "show", "dev", interface).stdout)
    return link["stats64"]["tx"]["bytes"]
