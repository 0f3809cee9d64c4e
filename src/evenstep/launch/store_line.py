"""Calls to the rendezvous store that end even if the process that keeps it hangs or cannot be reached.

A TCPStore client whose server is stopped or cut off waits forever, even with a time limit (seen in torch 2.13). So each
call is made in a daemon thread, which is abandoned if the call does not return.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, Final, TypeVar, final

from evenstep.launch.c10d import PrefixStore, Store, TCPStore
from evenstep.launch.connections import connections, cut

_CONNECT_SECONDS: Final = 5.0
_CLOSE_SECONDS: Final = 1.0
_CUT_SECONDS: Final = 30.0

Result = TypeVar("Result")


class StoreSilentError(Exception):
    """The store did not answer in time: the process that keeps it is stopped, or cannot be reached."""


class StoreGoneError(Exception):
    """The connection to the store is closed: the process that kept it has ended."""


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """What the call returns or raises; TimeoutError if it does not return in time, and its thread is abandoned."""
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

    One thread makes the calls, one after the other, since a client serves one caller at a time. After a call that did
    not return in time, all further ones fail at once.
    """

    def __init__(self, store: Store) -> None:
        self._silent = False
        self._cut = False
        self._connection = set[int]()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[Store], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(store,), daemon=True, name="evenstep-store")
        self._thread.start()

    def ask(self, call: Callable[[Store], Result]) -> "Future[Result]":
        """Have the call made, after those before it."""
        made: Future[Result] = Future()
        self._calls.put((made, call))
        return made

    def call(self, call: Callable[[Store], Result], seconds: float) -> Result:
        """What the call returns; StoreSilentError if it, or a call before it, did not return in time."""
        if self._silent:
            raise StoreSilentError
        try:
            return self.ask(call).result(seconds)
        except TimeoutError:
            self._silent = True
            raise StoreSilentError from None

    def close(self) -> None:
        """Close the connection. A call that is under way and does not return is cut off, so that its thread ends.

        Python ends a daemon thread that returns from a call while the interpreter shuts down, and C++ ends the process
        for that: `terminate called without an active exception` (Python before 3.14).
        """
        self._calls.put(None)
        self._thread.join(0 if self._silent else _CLOSE_SECONDS)
        if self._thread.is_alive():
            self._cut = True
            with _no_stderr():  # c10d would print a stack.
                cut(self._connection)
                self._thread.join(_CUT_SECONDS if self._connection else _CLOSE_SECONDS)

    def _serve(self, store: Store) -> None:
        probe: socket.socket | None = None
        own: Store | None = None
        with suppress(OSError, RuntimeError):
            address = address_of(store)
            probe = None if address is None else socket.create_connection(address, timeout=_CONNECT_SECONDS)
            before = set() if address is None else connections(address[1]).keys()
            own = store.clone()  # type: ignore[attr-defined]
            self._connection = set() if address is None else connections(address[1]).keys() - before
        while (asked := self._calls.get()) is not None:
            _make(asked[0], lambda: self._answer(own, probe, asked[1]))
        if probe is not None:
            with suppress(OSError):
                probe.close()

    def _answer(self, store: Store | None, probe: socket.socket | None, call: Callable[[Store], Result]) -> Result:
        # A call on a connection that is closed would print a stack of c10d's.
        if store is None or self._cut or (probe is not None and _closed(probe)):
            raise StoreGoneError
        try:
            return call(store)
        except RuntimeError as error:
            raise StoreGoneError from error


def _closed(probe: socket.socket) -> bool:
    """Whether a TCPStore's server has closed this connection, on which nothing is ever sent."""
    try:
        probe.setblocking(False)
        return not probe.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextmanager
def _no_stderr() -> Iterator[None]:
    """Drop what this process writes to its standard error, by descriptor."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def address_of(store: Store) -> tuple[str, int] | None:
    """Where the store listens; None if it is no TCPStore."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None
