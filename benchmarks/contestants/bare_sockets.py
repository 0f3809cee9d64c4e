"""The exchange and the update over plain sockets and nothing else: no header, no check, no failure handled.

A server process with a thread per connection. A worker sends its gradients, the thread receives them into a buffer of
its own, updates the weights under the lock of all, and sends the weights.
"""

import socket
import tempfile
import threading
from contextlib import nullcontext

import torch
import torch.distributed as dist
from harness.workers import run_workers

from contestants.case import LEARNING_RATE, Measured
from contestants.timing import timed

BUFFER_BYTES = 256 << 10
"""Asked for each socket's send and receive buffer. Of none to 4 MiB the best: larger ones fall out of the cache."""


def over_tcp(case):
    """Over TCP on the loopback interface, with TCP_NODELAY. A reply may mix weights before and after another update."""
    return _measure(case, "tcp", whole=False)


def over_unix(case):
    """Over a Unix socket, otherwise as over TCP."""
    return _measure(case, "unix", whole=False)


def over_tcp_whole(case):
    """Over TCP, each reply the weights of one version: copied under the lock, sent after it."""
    return _measure(case, "tcp", whole=True)


def over_unix_whole(case):
    """Over a Unix socket, each reply the weights of one version."""
    return _measure(case, "unix", whole=True)


def _measure(case, kind, *, whole):
    return run_workers(case.workers + 1, _node, (case, kind, whole), show=lambda text: None)


def _node(rank, plan, tell):
    """Ranks below the number of workers are workers, the last is the server."""
    case, kind, whole = plan
    result = _serve(case, kind, whole) if rank == case.workers else _work(case, kind)
    results = [None] * (case.workers + 1)
    dist.all_gather_object(results, result)
    *workers, updates = results
    exchanges = sum(done for _, done in workers)
    if updates != [exchanges, exchanges]:
        raise RuntimeError(f"{exchanges} exchanges left the weights as after {updates[0]:g} to {updates[1]:g} updates")
    return Measured(workers=tuple(one for one, _ in workers), details={"checked_updates": exchanges})


# The worker.


def _work(case, kind):
    gradients, weights = torch.ones(case.elements), torch.zeros(case.elements)
    outgoing, incoming = _bytes_of(gradients), _bytes_of(weights)
    address = [None]
    dist.broadcast_object_list(address, src=case.workers)
    done = 0

    def exchange():
        nonlocal done
        connection.sendall(outgoing)
        _receive(connection, incoming)
        done += 1

    with _socket(kind) as connection:
        connection.connect(address[0])
        result = timed(case, exchange, dist.barrier)
    return result, done


# The server.


def _serve(case, kind, whole):
    """How many updates the weights have seen, by the least and by the most changed."""
    weights, lock = torch.zeros(case.elements), threading.Lock()
    folder = tempfile.TemporaryDirectory() if kind == "unix" else nullcontext()
    with folder as path, _socket(kind) as listener:
        listener.bind(("127.0.0.1", 0) if path is None else f"{path}/server")
        listener.listen()
        dist.broadcast_object_list([listener.getsockname()], src=case.workers)
        threads = [
            threading.Thread(target=_answer, args=(_sized(listener.accept()[0]), weights, lock, whole))
            for _ in range(case.workers)
        ]
        for thread in threads:
            thread.start()
        dist.barrier()
        for thread in threads:
            thread.join()
    return [float(end) / -LEARNING_RATE for end in (weights.max(), weights.min())]


def _answer(connection, weights, lock, whole):
    torch.set_num_threads(1)
    gradients = torch.zeros_like(weights)
    reply = torch.zeros_like(weights) if whole else weights
    incoming, outgoing = _bytes_of(gradients), _bytes_of(reply)
    with connection:
        while _receive(connection, incoming):
            with lock:
                weights.add_(gradients, alpha=-LEARNING_RATE)
                if whole:
                    reply.copy_(weights)
            connection.sendall(outgoing)


# Both.


def _socket(kind):
    return _sized(socket.socket(socket.AF_INET if kind == "tcp" else socket.AF_UNIX, socket.SOCK_STREAM))


def _sized(one):
    if one.family == socket.AF_INET:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        one.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    return one


def _bytes_of(tensor):
    return memoryview(tensor.numpy()).cast("B")


def _receive(connection, buffer):
    """Fill the buffer; False where the peer has closed."""
    received = 0
    while received < len(buffer):
        count = connection.recv_into(buffer[received:])
        if not count:
            return False
        received += count
    return True
