"""Servers for runs within one set of workers, as the launcher would have started them."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch.distributed as dist

from evenstep.runtime.launch_settings import VARIABLE, LaunchSettings
from evenstep.runtime.server.process import SECRET_VARIABLE, ServerSettings, start_servers
from evenstep.schemes import parse_scheme


class Serving:
    """On rank 0: servers of many runs, started side by side while nothing is timed, since each takes a while.

    Idle servers take no processor time. `said` has what became of any of them, as sentences.
    """

    def __init__(self, workers):
        self._workers = workers
        self._servers = {}
        self.said = []

    def start(self, runs):
        """Servers for each of `(scheme, folder)` that needs any; those of before must be closed."""
        served = [(scheme, folder) for scheme, folder in runs if parse_scheme(scheme).served is not None]
        with ThreadPoolExecutor(max(1, len(served))) as pool:
            self._servers = dict(zip((folder for _, folder in served), pool.map(self._start, served), strict=True))

    def _start(self, run):
        scheme, folder = run
        settings = ServerSettings(
            count=parse_scheme(scheme).served.servers, workers=self._workers, snapshots=folder / "snapshots"
        )
        return start_servers(settings, lambda event: self.said.append(event["text"]))

    def of(self, folder):
        """What the workers of a run need to find its servers; None where it has none."""
        servers = self._servers.get(folder)
        return None if servers is None else (servers.addresses, servers.secret)

    def close(self):
        with ThreadPoolExecutor(max(1, len(self._servers))) as pool:
            list(pool.map(lambda servers: servers.close(), self._servers.values()))
        self._servers = {}


@contextmanager
def at(place):
    """On every worker, with rank 0's `place`: `prepare` finds the servers where the launcher would have named them."""
    told = [place]
    dist.broadcast_object_list(told)
    if told[0] is None:
        yield
        return
    addresses, secret = told[0]
    variables = {**LaunchSettings(servers=addresses).to_environment(), SECRET_VARIABLE: secret}
    assert VARIABLE in variables
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
