"""The all-gather of `Balancer` for frameworks whose collectives take milliseconds for a few bytes."""

import atexit
import ipaddress
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import Any, Final, NoReturn, final

import numpy as np

from evenstep.core.errors import EvenstepError, WorkerLostError
from evenstep.core.workers import name_workers
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.marks import leave_error
from evenstep.telemetry.say import say
from evenstep.transport.base import Connection, ConnectionLostError, SilentError
from evenstep.transport.connect import connect
from evenstep.transport.listen import listen
from evenstep.worker.api.gather import Gather

NEWS_SECONDS: Final = 5.0
"""How long to wait for news of a lost worker, after a failed exchange of the framework and beyond a timeout."""
_ROW: Final = b"row"


@final
class RowExchange:
    """Sends the row of every worker to worker 0, which answers with the rows of all.

    That is two messages, one after the other, where a ring of n workers takes n - 1. A connection that breaks tells
    worker 0 which worker has died, and it tells the others at once.

    Args:
        rank: This worker.
        workers: The number of workers.
        host: The address by which the other workers reach worker 0.
        framework: The name of the framework.
        add_up: Returns the sum of a float32 vector over all workers, by the framework. It is called once.
        everywhere: Whether the framework listens on all addresses, whatever the workers' addresses are.

    Raises:
        ConfigError: The workers are on several hosts, and `cryptography` is not installed.
    """

    def __init__(
        self,
        *,
        rank: int,
        workers: int,
        host: str,
        framework: str,
        add_up: Callable[[Any], Any],
        everywhere: bool = False,
    ) -> None:
        self.rank = rank
        self.workers = workers
        self._peers: dict[int, Connection] = {}
        self._came: SimpleQueue[tuple[int, bytes, bytes]] = SimpleQueue()
        """On worker 0: the sender of a message, its header and its row."""
        self.limit(None)
        self.gather = Gather(self.all_gather, rank=rank, workers=workers)
        self._closed = False
        self._listeners: list[Thread] = []
        self._lost: WorkerLostError | None = None
        """The error that this worker has raised."""
        self._sending = Lock()
        """A worker may end as soon as it has its rows; the others must get theirs before they hear of that."""
        if workers > 1:
            if rank == 0 and (everywhere or not _is_loopback(host)) and len(socket.if_nameindex()) > 1:
                say(
                    f"the ports of {framework} are open to the network without a secret, and who reaches them can take"
                    " part in the run or read and write its files: use a network that you trust, or on one host"
                    " a network namespace (docs/servers.md)"
                )
            self._meet(host, add_up)
            # A framework may wait for all workers when a script ends, as jax.distributed does. An error in one script
            # must reach the others before, and functions registered last are called first.
            atexit.register(self._close)
            sys.excepthook, self._show = self._tell, sys.excepthook

    def limit(self, timeout: float | None) -> None:
        """Limit a worker's time from one exchange to the next; None: as long as the user says, else 300 s.

        Raises:
            ConfigError: The timeout is not valid.
        """
        self._timeout_seconds = LaunchSettings.from_environment(os.environ).timeout_seconds(timeout)

    def all_gather(self, row: bytes) -> list[bytes]:
        """Return the rows of all workers by rank, of the same length.

        Raises:
            WorkerLostError: A worker is gone, or does not come in time.
        """
        if self.rank == 0:
            rows, deadline = {0: row}, time.monotonic() + self._timeout_seconds
            while len(rows) < self.workers:
                try:
                    rank, header, sent = self._came.get(timeout=max(0.0, deadline - time.monotonic()))
                except Empty:
                    said = self._late([each for each in range(self.workers) if each not in rows])
                    self._tell_others(said)
                    self._lose(said)
                rows[rank] = self._row_of(header, sent)
            together = b"".join(rows[rank] for rank in range(self.workers))
            with self._sending:
                for rank in self._peers:
                    self._send(rank, together)
        else:
            self._send(0, row)
            # Worker 0 knows better who is missing.
            try:
                together = self._answer(self._timeout_seconds + NEWS_SECONDS)
            except SilentError:
                self._lose(self._late([0]))
        return [together[at : at + len(row)] for at in range(0, len(together), len(row))]

    def failed(self) -> None:
        """Find out which worker is gone after an exchange of the framework failed on this worker.

        Raises:
            WorkerLostError: A worker is gone; the error names it.
        """
        with suppress(Empty, SilentError):
            while True:
                if self.rank:
                    self._answer(NEWS_SECONDS)
                else:
                    self._row_of(*self._came.get(timeout=NEWS_SECONDS)[1:])

    @property
    def lost(self) -> bool:
        """True if this worker has missed another."""
        return self._lost is not None

    def _late(self, ranks: list[int]) -> str:
        return (
            f"{name_workers(ranks)} did not come to the next exchange within {self._timeout_seconds:g} s: see what its"
            " script does there, then start again, with a larger timeout if it needs that long"
        )

    def _lose(self, said: str) -> NoReturn:
        self._lost = WorkerLostError(said)
        raise self._lost

    def _row_of(self, header: bytes, row: bytes) -> bytes:
        """Return the row of a message; WorkerLostError if it says that a worker is gone."""
        if header != _ROW:
            self._lose(header.decode())
        return row

    def _send(self, rank: int, row: bytes) -> None:
        try:
            self._peers[rank].send(_ROW, memoryview(row))
        except ConnectionLostError:
            self._lose(_gone(rank))

    def _answer(self, timeout: float) -> bytes:
        """Return the next row that worker 0 sends, on the other workers. SilentError if nothing comes in time."""
        try:
            return self._row_of(*_received(self._peers[0], timeout))
        except ConnectionLostError:
            self._lose(_gone(0))

    def _listen(self, rank: int, peer: Connection) -> None:
        """On worker 0, in a thread for each other worker: receive until that worker is gone, and tell the others."""
        try:
            while True:
                self._came.put((rank, *_received(peer, None)))
        except ConnectionLostError:
            if self._closed:
                return  # This worker closed it, not the other one.
            said = _gone(rank)
            self._tell_others(said)
            self._came.put((rank, said.encode(), b""))

    def _tell_others(self, said: str) -> None:
        with self._sending:
            for peer in self._peers.values():
                with suppress(ConnectionLostError):
                    peer.send(said.encode(), wait=False)

    def _tell(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Leave the cause of an error that ends this process. A framework may have wrapped it in one of its errors."""
        told = self._lost or error
        if isinstance(told, EvenstepError):
            leave_error(told)
        self._show(kind, error, traceback)

    def _close(self) -> None:
        self._closed = True
        if self._lost is not None:
            # The coordinator of jax.distributed ends with worker 0, and aborts the others before they say why: they get
            # two seconds for it.
            deadline = time.monotonic() + 2.0
            for each in self._listeners:
                each.join(max(0.0, deadline - time.monotonic()))
        for peer in self._peers.values():
            peer.close()

    def _meet(self, host: str, add_up: Callable[[Any], Any]) -> None:
        """Connect the other workers to worker 0, whose address and secret they learn through the framework."""

        def told(text: str) -> bytes:
            letters = np.frombuffer(text.encode().ljust(1024), np.uint8)
            numbers = letters.astype(np.float32) * np.float32(self.rank == 0)
            return np.asarray(add_up(numbers)).astype(np.uint8).tobytes()

        if self.rank:
            invitation = json.loads(told(""))
            peer = connect(invitation["addresses"], secret=bytes.fromhex(invitation["secret"]))
            peer.send(json.dumps(self.rank).encode())
            self._peers = {0: peer}
            return
        secret = secrets.token_bytes(32)
        with listen(host, secret=secret) as listener:
            told(json.dumps({"addresses": listener.addresses, "secret": secret.hex()}))
            for _ in range(self.workers - 1):
                peer = listener.accept()
                self._peers[json.loads(peer.receive(self._timeout_seconds).header)] = peer
        for rank, peer in self._peers.items():
            name = f"evenstep rows of {rank}"
            self._listeners.append(Thread(target=self._listen, args=(rank, peer), name=name, daemon=True))
        for each in self._listeners:
            each.start()


def _received(peer: Connection, timeout: float | None) -> tuple[bytes, bytes]:
    """Return the next message: its header, and the row behind it."""
    message = peer.receive(timeout)
    row = bytearray(message.payload_bytes)
    peer.receive_payload(memoryview(row))
    return message.header, bytes(row)


def _is_loopback(host: str) -> bool:
    with suppress(OSError, ValueError):
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    return False


def _gone(rank: int) -> str:
    return f"worker {rank} is gone: its own output tells why"
