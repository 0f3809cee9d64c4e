"""The all-gather of `Balancer` for frameworks whose collectives take milliseconds for a few bytes."""

import atexit
import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Final, final

import numpy as np

from evenstep.core.errors import WorkerLostError
from evenstep.transport.base import Connection, ConnectionLostError, SilentError
from evenstep.transport.connect import connect
from evenstep.transport.listen import listen

TIMEOUT_SECONDS: Final = 1800.0
"""How long a worker may take from one exchange to the next. It may compile, evaluate or save in between."""
NEWS_SECONDS: Final = 5.0
"""How long to wait for news of a lost worker, after an exchange of the framework has failed."""
_INVITATION: Final = 1024
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
        add_up: Returns the sum of a float32 vector over all workers, by the framework. It is called once.

    Raises:
        ConfigError: The workers are on several hosts, and `cryptography` is not installed.
    """

    def __init__(self, *, rank: int, workers: int, host: str, add_up: Callable[[Any], Any]) -> None:
        self._rank = rank
        self._workers = workers
        self._peers: dict[int, Connection] = {}
        self._came: SimpleQueue[tuple[int, bytes, bytes]] = SimpleQueue()
        """On worker 0: from whom a message came, its header and its row."""
        self._closed = False
        self._sending = Lock()
        """A worker may end as soon as it has its rows; the others get theirs before they hear of that."""
        if workers > 1:
            self._meet(host, add_up)
            # A framework may wait for all workers when a script ends, as jax.distributed does. An error in one script
            # must reach the others before, and functions registered last are called first.
            atexit.register(self._close)

    def all_gather(self, row: bytes) -> list[bytes]:
        """The rows of all workers by rank, of the same length.

        Raises:
            WorkerLostError: A worker is gone, or does not come in time.
        """
        if self._rank == 0:
            rows = {0: row}
            while len(rows) < self._workers:
                rank, rows[rank] = self._next(rows)
            together = b"".join(rows[rank] for rank in range(self._workers))
            with self._sending:
                for rank in self._peers:
                    self._send(rank, together)
        else:
            self._send(0, row)
            together = self._answer(TIMEOUT_SECONDS)
        return [together[at : at + len(row)] for at in range(0, len(together), len(row))]

    def failed(self) -> None:
        """An exchange of the framework failed on this worker.

        Raises:
            WorkerLostError: A worker is gone, which it names.
        """
        with suppress(Empty, SilentError):
            while True:
                if self._rank:
                    self._answer(NEWS_SECONDS)
                else:
                    _row_of(*self._came.get(timeout=NEWS_SECONDS)[1:])

    def _next(self, rows: dict[int, bytes]) -> tuple[int, bytes]:
        """On worker 0: the next row, and whose it is."""
        try:
            rank, header, row = self._came.get(timeout=TIMEOUT_SECONDS)
        except Empty:
            missing = next(rank for rank in range(self._workers) if rank not in rows)
            raise WorkerLostError(f"worker {missing} did not come within {TIMEOUT_SECONDS:g} s") from None
        return rank, _row_of(header, row)

    def _send(self, rank: int, row: bytes) -> None:
        try:
            self._peers[rank].send(_ROW, memoryview(row))
        except ConnectionLostError:
            raise WorkerLostError(_gone(rank)) from None

    def _answer(self, timeout: float) -> bytes:
        """On another worker than 0: the next row that worker 0 sends. SilentError if nothing comes in time."""
        try:
            return _row_of(*_received(self._peers[0], timeout))
        except ConnectionLostError:
            raise WorkerLostError(_gone(0)) from None

    def _listen(self, rank: int, peer: Connection) -> None:
        """On worker 0, in a thread for each other worker: receive until that worker is gone, and tell the others."""
        try:
            while True:
                self._came.put((rank, *_received(peer, None)))
        except ConnectionLostError:
            if self._closed:
                return  # By this worker, and not by that one.
            said = _gone(rank).encode()
            with self._sending:
                for other in self._peers.values():
                    if other is not peer:
                        with suppress(ConnectionLostError):
                            other.send(said, wait=False)
            self._came.put((rank, said, b""))

    def _close(self) -> None:
        self._closed = True
        for peer in self._peers.values():
            peer.close()

    def _meet(self, host: str, add_up: Callable[[Any], Any]) -> None:
        """Connect the other workers to worker 0, whose address and secret they learn through the framework."""

        def told(text: str) -> bytes:
            letters = np.frombuffer(text.encode().ljust(_INVITATION), np.uint8)
            numbers = letters.astype(np.float32) * np.float32(self._rank == 0)
            return np.asarray(add_up(numbers)).astype(np.uint8).tobytes()

        if self._rank:
            invitation = json.loads(told(""))
            peer = connect(invitation["addresses"], secret=bytes.fromhex(invitation["secret"]))
            peer.send(json.dumps(self._rank).encode())
            self._peers = {0: peer}
            return
        secret = secrets.token_bytes(32)
        with listen(host, secret=secret) as listener:
            told(json.dumps({"addresses": listener.addresses, "secret": secret.hex()}))
            for _ in range(self._workers - 1):
                peer = listener.accept()
                self._peers[json.loads(peer.receive(TIMEOUT_SECONDS).header)] = peer
        for rank in self._peers:
            Thread(
                target=self._listen, args=(rank, self._peers[rank]), name=f"evenstep rows of {rank}", daemon=True
            ).start()


def _received(peer: Connection, timeout: float | None) -> tuple[bytes, bytes]:
    """The next message: its header, and the row behind it."""
    message = peer.receive(timeout)
    row = bytearray(message.payload_bytes)
    peer.receive_payload(memoryview(row))
    return message.header, bytes(row)


def _row_of(header: bytes, row: bytes) -> bytes:
    """The row of a message; WorkerLostError if it says that a worker is gone."""
    if header != _ROW:
        raise WorkerLostError(header.decode())
    return row


def _gone(rank: int) -> str:
    return f"worker {rank} is gone: its own output tells why"
