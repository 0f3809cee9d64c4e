"""Calls to the rendezvous store that end even if the process that keeps it hangs or cannot be reached.

A TCPStore client whose server is stopped or cut off waits for ever, with a time limit or without (seen in torch 2.13).
So every call is made in a daemon thread, which is left behind where the call does not come back.
"""

import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, Self, TypeVar, final

from evenstep.launch.c10d import PrefixStore, Store, TCPStore

_CONNECT_SECONDS: Final = 5.0
_CLOSE_SECONDS: Final = 1.0

Result = TypeVar("Result")


class StoreSilentError(Exception):
    """The store did not answer in time: the process that keeps it is stopped, or cannot be reached."""


class StoreGoneError(Exception):
    """The connection to the store is closed: the process that kept it has ended."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKeeper:
    """The process that keeps the store: a worker, torchrun's agent, or none where the store is a file.

    Attributes:
        name: As it begins a sentence.
        worker: Its rank, where it is a worker.
        host: Where the store listens; empty where it is a file.
        port: The port there.
    """

    name: str
    worker: int | None = None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        where = f" at {self.host}:{self.port}" if self.host else ""
        return f"{self.name}, which keeps the rendezvous store{where},"

    def unreachable(self) -> str:
        """The sentence for a store that does not answer."""
        return (
            f"{self} is stopped or cannot be reached: look at its output and the network between the hosts, then start"
            " again"
        )

    @classmethod
    def named(cls, host: str, port: int, environment: Mapping[str, str]) -> Self:
        """The keeper of a store that listens there."""
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return cls(name="torchrun's agent", host=host, port=port)
        return cls(name="worker 0", worker=0, host=host, port=port)

    @classmethod
    def of(cls, store: Store, environment: Mapping[str, str]) -> Self:
        """The keeper of this store."""
        address = _address(store)
        return cls(name="the file system") if address is None else cls.named(*address, environment)


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """What the call returns or raises.

    Raises:
        TimeoutError: It did not come back in time. Its thread is left behind and does not keep the process.
    """
    made: Future[Result] = Future()
    threading.Thread(target=_make, args=(made, call), daemon=True, name="evenstep-within").start()
    return made.result(seconds)


def _make(made: "Future[Any]", call: Callable[[], Any]) -> None:
    try:
        made.set_result(call())
    except BaseException as error:
        made.set_exception(error)


@final
class StoreLine:
    """A separate connection to a store. Any thread may use it, and each call has a time limit.

    One thread makes the calls, one after the other, since a client serves one caller at a time. A call that did not
    come back in time ends the line: all further ones fail at once.
    """

    def __init__(self, store: Store) -> None:
        self._silent = False
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[Store], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(store,), daemon=True, name="evenstep-store")
        self._thread.start()

    def ask(self, call: Callable[[Store], Result]) -> "Future[Result]":
        """Have the call made, after those before it."""
        made: Future[Result] = Future()
        self._calls.put((made, call))
        return made

    def call(self, call: Callable[[Store], Result], seconds: float) -> Result:
        """What the call returns.

        Raises:
            StoreSilentError: It did not come back in time, or one before it did not.
            StoreGoneError: The store is no more.
        """
        if self._silent:
            raise StoreSilentError
        try:
            return self.ask(call).result(seconds)
        except TimeoutError:
            self._silent = True
            raise StoreSilentError from None

    def close(self) -> None:
        """Let go of the connection, unless a call is still under way."""
        self._calls.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def _serve(self, store: Store) -> None:
        gone: _Watch | None = None
        own: Store | None = None
        with suppress(OSError, RuntimeError):
            gone = _Watch(store)
            own = store.clone()  # type: ignore[attr-defined]
        while (asked := self._calls.get()) is not None:
            _make(asked[0], lambda: _answer(own, gone, asked[1]))
        if gone is not None:
            gone.close()


def _answer(store: Store | None, gone: "_Watch | None", call: Callable[[Store], Result]) -> Result:
    # A call on a connection that is closed would print a stack of c10d's.
    if store is None or gone is None or gone():
        raise StoreGoneError
    try:
        return call(store)
    except RuntimeError as error:
        raise StoreGoneError from error


@final
class _Watch:
    """Says whether a TCPStore's server has closed its connections, by a connection on which nothing is ever sent."""

    def __init__(self, store: Store) -> None:
        address = _address(store)
        self._socket = None if address is None else socket.create_connection(address, timeout=_CONNECT_SECONDS)
        if self._socket is not None:
            self._socket.setblocking(False)

    def __call__(self) -> bool:
        if self._socket is None:
            return False
        try:
            return not self._socket.recv(1)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()


def _address(store: Store) -> tuple[str, int] | None:
    """Where the store listens; None where it is no TCPStore."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None
