"""The all-gather of `Balancer` for frameworks whose collectives take milliseconds for a few bytes."""

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar, final

import numpy as np

from evenstep.core.errors import WorkerLostError
from evenstep.transport.base import Connection, ConnectionLostError, SilentError
from evenstep.transport.connect import connect
from evenstep.transport.listen import listen

Answer = TypeVar("Answer")

TIMEOUT_SECONDS: Final = 1800.0
"""How long a worker may take from one exchange to the next. It may compile, evaluate or save in between."""
_INVITATION: Final = 1024
_ROW: Final = b"row"
_COMPLETE: Final = b"complete"
"""Worker 0's answer after an error: all workers are connected."""
_ELSEWHERE: Final = "another worker has met an error: its own output tells which"


@final
class RowExchange:
    """Sends the row of every worker to worker 0, which answers with the rows of all.

    That is two messages, one after the other, where a ring of n workers takes n - 1. A connection that breaks tells
    which worker has died.

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
        if workers > 1:
            self._meet(host, add_up)

    def all_gather(self, row: bytes) -> list[bytes]:
        """The rows of all workers by rank, of the same length.

        Raises:
            WorkerLostError: A worker is gone, or has met an error, or does not come in time.
        """
        if self._rank == 0:
            rows = [bytearray(row) for _ in range(self._workers)]
            if self._collect(rows):
                raise WorkerLostError(_ELSEWHERE)
            together = memoryview(b"".join(rows))
            for rank in self._peers:
                self._within(rank, lambda peer: peer.send(_ROW, together))
            return [bytes(each) for each in rows]
        answer = bytearray(self._workers * len(row))
        self._within(0, lambda peer: peer.send(_ROW, memoryview(row)))
        header = self._within(0, lambda peer: _receive(peer, answer))
        if header != _ROW:
            raise WorkerLostError(_ELSEWHERE if header == _COMPLETE else header.decode())
        return [bytes(answer[at : at + len(row)]) for at in range(0, len(answer), len(row))]

    def failed(self, error: str) -> None:
        """An exchange of the framework failed on this worker, with this error.

        Raises:
            WorkerLostError: A worker is gone, which it names.
        """
        if self._rank == 0:
            self._collect([bytearray()] * self._workers)
            self._tell(_COMPLETE)
            return
        self._within(0, lambda peer: peer.send(error.encode()))
        header = self._within(0, lambda peer: _receive(peer, bytearray()))
        if header != _COMPLETE:
            raise WorkerLostError(header.decode())

    def _collect(self, rows: Sequence[bytearray]) -> bool:
        """On worker 0: receive the row of each other worker, or its error. Returns whether there was an error."""
        headers = [self._within(rank, partial(_receive, into=rows[rank])) for rank in self._peers]
        failed = any(header != _ROW for header in headers)
        if failed:
            self._tell(_COMPLETE)
        return failed

    def _within(self, rank: int, exchange: Callable[[Connection], Answer]) -> Answer:
        """Exchange something with this worker; if it is gone, worker 0 tells the others."""
        try:
            return exchange(self._peers[rank])
        except ConnectionLostError:
            said = f"worker {rank} is gone: its own output tells why"
        except SilentError:
            said = f"worker {rank} did not come within {TIMEOUT_SECONDS:g} s"
        self._tell(said.encode(), but=rank)
        raise WorkerLostError(said)

    def _tell(self, text: bytes, but: int = 0) -> None:
        for rank, peer in self._peers.items():
            if rank != but:
                with suppress(ConnectionLostError):
                    peer.send(text, wait=False)

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


def _receive(peer: Connection, into: bytearray) -> bytes:
    """The header of the next message; the row behind it, if it is as long as the buffer, goes into that."""
    message = peer.receive(TIMEOUT_SECONDS)
    if message.header == _ROW and message.payload_bytes == len(into):
        peer.receive_payload(memoryview(into))
    return message.header
