"""The workers of MXNet's distributed kvstore: sums over all of them, and rows that no float has to carry."""

import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any, Final, final

import mxnet as mx
import numpy as np

from evenstep.core.errors import ConfigError, WorkerLostError
from evenstep.core.shown import shown
from evenstep.transport.base import Connection, ConnectionLostError, SilentError
from evenstep.transport.connect import connect
from evenstep.transport.listen import listen

TIMEOUT_SECONDS: Final = 300.0
_INVITATION: Final = 1024
_keys = count(1 << 20)  # Beyond those of a Trainer, which counts its parameters from 0.
_key_of: dict[tuple[str, int], int] = {}
"""The store's keys by dtype and length; the server keeps them as long as this process runs."""


@final
class Workers:
    """All workers of a store.

    The store sums floating-point vectors. It rounds integers above 2^24 and its pulls never end if a worker has died,
    so rows go through worker 0, over a connection that breaks when a worker dies; and they go before each sum.

    Args:
        store: A kvstore, or its name.

    Raises:
        ConfigError: It does not wait for all workers.
    """

    def __init__(self, store: Any) -> None:
        name = store if isinstance(store, str) else getattr(store, "type", None)
        if name not in ("dist_sync", "dist_device_sync", "dist_sync_device"):
            raise ConfigError(
                f"the kvstore of the trainer is {shown(store if name is None else name)}, which does not sum the"
                ' gradients of all workers: give kvstore="dist_sync", and start the workers with evenstep run'
                " --framework mxnet"
            )
        if os.environ.get("DMLC_ROLE") != "worker":
            raise ConfigError(
                f"the kvstore {name!r} needs a scheduler, a server and DMLC_ROLE=worker: start the script with"
                " evenstep run --framework mxnet"
            )
        self._store = mx.kv.create(store) if isinstance(store, str) else store
        self.count = int(self._store.num_workers)
        # The store numbers workers as they come; a launcher's numbers are those that its messages and --slow name.
        launched = os.environ.get("WORLD_SIZE") == str(self.count) and "RANK" in os.environ
        self.rank = int(os.environ["RANK"]) if launched else int(self._store.rank)
        self._peers: dict[int, Connection] = {}
        if self.count > 1:
            self._meet()

    def sum(self, vector: Any) -> Any:
        """The sum of a vector of float32 or float64 over all workers."""
        if self.count == 1:
            return vector
        kind = np.dtype(vector.dtype).name, vector.size
        key = _key_of.get(kind)
        if key is None:
            key = _key_of[kind] = next(_keys)
            self._store.init(key, mx.nd.zeros(vector.shape, dtype=vector.dtype))
        total = mx.nd.empty(vector.shape, dtype=vector.dtype)
        self._store.push(key, vector)
        self._store.pull(key, out=total)
        # A process that ends leaves out what it has not begun, and the others would wait for its part for ever.
        total.wait_to_read()
        return total

    def all_gather(self, row: bytes) -> list[bytes]:
        """The rows of all workers by rank, of the same length.

        Raises:
            WorkerLostError: A worker is gone, or does not come.
        """
        if self.count == 1:
            return [row]
        if self.rank:
            rows = bytearray(self.count * len(row))
            self._within(0, lambda peer: peer.send(b"row", memoryview(row)))
            self._within(0, partial(self._receive, memoryview(rows)))
            return [bytes(rows[at : at + len(row)]) for at in range(0, len(rows), len(row))]
        found = [bytearray(row) for _ in range(self.count)]
        for rank in range(1, self.count):
            self._within(rank, partial(self._receive, memoryview(found[rank])))
        together = memoryview(b"".join(found))
        for rank in self._peers:
            self._within(rank, lambda peer: peer.send(b"row", together))
        return [bytes(each) for each in found]

    def _receive(self, buffer: memoryview, peer: Connection) -> None:
        message = peer.receive(TIMEOUT_SECONDS)
        if message.header != b"row":
            raise WorkerLostError(message.header.decode())  # Worker 0 says who is gone.
        peer.receive_payload(buffer)

    def _within(self, rank: int, exchange: Callable[[Connection], None]) -> None:
        """Exchange something with this worker; if it is gone, all others are told."""
        try:
            exchange(self._peers[rank])
            return
        except ConnectionLostError:
            said = f"worker {rank} is gone: its own output tells why"
        except SilentError:
            said = f"worker {rank} did not come within {TIMEOUT_SECONDS:g} s"
        except WorkerLostError as error:
            said = str(error)
        for other, peer in self._peers.items():
            if other != rank:
                try:
                    peer.send(said.encode(), wait=False)
                except ConnectionLostError:
                    continue
        raise WorkerLostError(said) from None

    def _meet(self) -> None:
        """Connect all workers to worker 0, whose address and secret the store tells them."""
        if self.rank:
            invitation = json.loads(self._told(b""))
            peer = connect(invitation["addresses"], secret=bytes.fromhex(invitation["secret"]))
            peer.send(json.dumps(self.rank).encode())
            self._peers = {0: peer}
            return
        secret = secrets.token_bytes(32)
        with listen(_own_address(), secret=secret) as listener:
            self._told(json.dumps({"addresses": listener.addresses, "secret": secret.hex()}).encode())
            for _ in range(self.count - 1):
                peer = listener.accept()
                self._peers[json.loads(peer.receive(TIMEOUT_SECONDS).header)] = peer

    def _told(self, text: bytes) -> bytes:
        """What worker 0 tells the others, a byte in each number."""
        padded = np.frombuffer(text.ljust(_INVITATION, b" "), np.uint8) * np.float32(self.rank == 0)
        return self.sum(mx.nd.array(padded)).asnumpy().astype(np.uint8).tobytes()

    def broadcast(self, arrays: Sequence[Any]) -> None:
        """Give the arrays the values that they have on worker 0."""
        for array in arrays:
            own = array.reshape(-1) if self.rank == 0 else mx.nd.zeros(array.size, dtype=array.dtype)
            array[:] = self.sum(own).reshape(array.shape)


_joined: Workers | None = None


def join(store: Any) -> Workers:
    """The workers of the store; a process can have one store, since a second one never gets an answer.

    Raises:
        ConfigError: It does not wait for all workers.
    """
    global _joined
    if _joined is None:
        _joined = Workers(store)
    return _joined


def _own_address() -> str:
    """The address of this host by which the scheduler's host reaches it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        trial.connect((os.environ.get("DMLC_PS_ROOT_URI", "127.0.0.1"), 9))  # Sends nothing.
        address: str = trial.getsockname()[0]
        return address
