"""A parameter server for one of many runs in the same workers, where `prepare` finds it as the launcher's.

It is the library's own server program in a process of its own. It is forked from one that has imported torch, since
what that takes would be most of a short run.
"""

import json
import os
import secrets
import socket
import sys
from contextlib import contextmanager
from multiprocessing import get_context

import torch.distributed as dist

from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.server_settings import SECRET_VARIABLE
from evenstep.schemes import parse_scheme
from evenstep.server import program

_PRELOADED = ["torch", "torch._dynamo", "evenstep.server.program"]


@contextmanager
def served(scheme, folder):
    """On every worker, around `prepare` and all that follows: a server where the scheme asks for one."""
    asked = parse_scheme(scheme).served
    if asked is None:
        yield
        return
    if asked.servers != 1:
        raise ValueError(f"{scheme}: this harness starts one server")
    if dist.get_rank():
        with _told(None):
            yield
        return
    secret = secrets.token_hex(32)
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    ours, theirs = socket.socketpair()
    process = context.Process(target=_serve, args=(theirs, secret, dist.get_world_size(), str(folder)))
    process.start()
    theirs.close()
    with ours, ours.makefile() as said:
        addresses = tuple(json.loads(said.readline())["addresses"])
        with _told((addresses, secret)):
            yield
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the server of {scheme} ended with {process.exitcode}")


@contextmanager
def _told(place):
    """With the environment that the launcher would have made, from what rank 0 knows."""
    told = [place]
    dist.broadcast_object_list(told)
    addresses, secret = told[0]
    variables = {**LaunchSettings(servers=(addresses,)).to_environment(), SECRET_VARIABLE: secret}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def _serve(line, secret, workers, folder):
    """The server's process. Both its standard streams are the line to rank 0; it ends when that closes."""
    os.environ[SECRET_VARIABLE] = secret
    os.dup2(line.fileno(), 0)
    sys.stdin, sys.stdout = line.makefile(), line.makefile("w")
    settings = {"index": 0, "count": 1, "workers": workers, "snapshots": os.path.join(folder, "snapshots")}
    sys.exit(program.main([json.dumps(settings)]))
