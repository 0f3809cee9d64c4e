"""Runs a function in several real workers of a run on parameter servers, which are started as the workers are.

The servers run the server program itself; forked like the workers, so that one starts in tens of milliseconds.
"""

import ipaddress
import json
import os
import secrets
import socket
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.server_settings import SECRET_VARIABLE
from evenstep.telemetry import RunTail
from support.guard import GUARD_SECONDS
from support.processes import CONTEXT, run_workers
from support.records import check_records


def run_served(function, workers, *arguments, run_dir, servers=1, network=False, **settings):
    """Every worker's outcome of `function(*arguments)`; the servers end with the last worker.

    `network`: over TCP only, as between hosts. `settings` are the server program's, such as `heartbeat_seconds`, and an
    address to `listen` on; beyond loopback TCP is encrypted.
    """
    settings = {"snapshots": str(run_dir / "snapshots"), "count": servers, "workers": workers, **settings}
    with serving(settings, servers) as (addresses, secret):
        return run_workers(
            function,
            workers,
            *arguments,
            environment=environment(addresses, secret, run_dir, network=network),
        )


def environment(addresses, secret, run_dir, *, network=False):
    """What the launcher would tell the workers."""
    if network:
        addresses = [[each for each in shard if not each.startswith("unix:")] for shard in addresses]
    launched = LaunchSettings(servers=tuple(map(tuple, addresses)), run_dir=str(run_dir))
    return {**launched.to_environment(), SECRET_VARIABLE: secret}


def outer_host():
    """An address of this host that is not loopback."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == socket.AF_INET and not ipaddress.ip_address(address.address).is_loopback:
                return address.address
    pytest.skip("this machine has no network interface beside loopback")
    return None


@contextmanager
def serving(settings, servers):
    """The addresses of forked servers, and their secret."""
    secret = secrets.token_hex(32)
    with ExitStack() as stack:
        others = [stack.enter_context(forked({**settings, "index": i}, secret)) for i in range(1, servers)]
        first = stack.enter_context(forked({**settings, "index": 0, "shards": others}, secret))
        yield [first, *others], secret


@contextmanager
def forked(settings, secret, serve=None):
    """The addresses of one forked server, which may be another function's."""
    end, remote = CONTEXT.Pipe()
    # Its own terminal would be the fork server's, which no test captures.
    with tempfile.NamedTemporaryFile() as terminal:
        process = CONTEXT.Process(target=serve or serve_on, args=(settings, secret, remote, terminal.name))
        process.start()
        remote.close()
        try:
            with os.fdopen(os.dup(end.fileno()), "rb") as said:
                yield json.loads(said.readline())["addresses"]
            end.close()
            process.join(GUARD_SECONDS)
            assert process.exitcode == 0, f"server {settings['index']} ended with {process.exitcode}"
        finally:
            process.kill()
            process.join()
            os.write(2, terminal.read())


def serve_on(settings, secret, end, terminal):
    from evenstep.server import program

    os.environ[SECRET_VARIABLE] = secret
    os.dup2(os.open(terminal, os.O_WRONLY | os.O_APPEND), 2)
    os.dup2(end.fileno(), 1)
    sys.stdin = os.fdopen(os.dup(end.fileno()), "rb")
    end.close()
    sys.stdout = os.fdopen(1, "w", closefd=False)
    code = program.main([json.dumps(settings)])
    # As a process that was started on its own would: threads that wait for peers are left where they are.
    os._exit(code)


def server_events(run_dir, kind=None):
    """What shard 0 has written down, every line of which is a record."""
    check_records(Path(run_dir))
    return [
        event for event in RunTail(Path(run_dir)).new_in(Path(run_dir, "server-0.jsonl")) if kind in (None, event.kind)
    ]


def leaves(run_dir):
    """Worker -> why it left, in the order in which it did."""
    found = {}
    for event in server_events(run_dir, "leave"):
        found.setdefault(event.worker, []).append(event.why)
    return found
