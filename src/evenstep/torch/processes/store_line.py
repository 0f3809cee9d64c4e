"""Calls to the rendezvous store that end even if the process that keeps it hangs or cannot be reached; and who that is.

A TCPStore client whose server is stopped or cut off waits forever, even with a time limit (seen in torch 2.13). So each
call is made in a daemon thread, which is abandoned if the call does not return.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, TypeVar, final

from evenstep.core.errors import ConfigError, EvenstepError, WorkerLostError
from evenstep.launch.c10d import PrefixStore, Store, TCPStore, reason
from evenstep.torch.processes.connections import connections, cut, is_closed

GRACE_SECONDS: Final = 5.0
"""How much longer than its limit a wait may take if the store does not answer at all."""

_CLOSE_SECONDS: Final = 1.0  # For a last call that is under way; most take milliseconds.

Result = TypeVar("Result")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKeeper:
    """The process that keeps the store: a worker, torchrun's agent, or none if the store is a file.

    Attributes:
        name: As it begins a sentence.
        worker: Its rank, if it is a worker.
        host: Where the store listens; empty if it is a file.
    """

    name: str
    worker: int | None = None
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        where = f" at {self.host}:{self.port}" if self.host else ""
        return f"{self.name}, which keeps the rendezvous store{where},"

    def unreachable(self) -> WorkerLostError:
        """Make the error of a store that does not answer."""
        return WorkerLostError(
            f"{self} is stopped or cannot be reached: look at its output and the network between the hosts, then start"
            " again"
        )

    def gone(self) -> WorkerLostError:
        """Make the error of a store whose connection is closed."""
        return WorkerLostError(
            f"{self} is gone, and which worker failed first cannot be told any more: look at the output of all workers,"
            " then start again"
        )

    def failed(self, why: str) -> str:
        """Make the sentence for a call that failed at the store."""
        return f"{self} ended, or did not go on in time ({why}): look at the output of all workers, then start again"


def keeper_of(store: Store | None, environment: Mapping[str, str]) -> StoreKeeper:
    """Return the keeper of this store, or of the environment's; ConfigError if the environment has no port."""
    if store is not None:
        address = address_of(store)
        if address is None:
            return StoreKeeper(name="the file system")
        host, port = address
    else:
        text = environment["MASTER_PORT"]
        if not text.isdigit():
            raise ConfigError(f"MASTER_PORT must be a port's number, not {text!r}: start the script with torchrun")
        host, port = environment["MASTER_ADDR"], int(text)
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return StoreKeeper(name="torchrun's agent", host=host, port=port)
    return StoreKeeper(name="worker 0", worker=0, host=host, port=port)


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Return or raise what the call does; TimeoutError if it does not end in time, and its thread is abandoned."""
    made: Future[Result] = Future()
    threading.Thread(target=_make, args=(made, call), daemon=True, name="evenstep-within").start()
    return made.result(seconds)


def bounded(
    call: Callable[[], Result], seconds: float, keeper: StoreKeeper, failed: Callable[[str], str] | None = None
) -> Result:
    """Make a call that uses the store and ends within that many seconds if the store answers; return its result.

    WorkerLostError if the call does not return, or fails in the communication library. `failed` makes the sentence from
    the reason; by default it says that the store failed.
    """
    try:
        return within(seconds + GRACE_SECONDS, call)
    except TimeoutError:
        raise keeper.unreachable() from None
    except EvenstepError:
        raise
    except RuntimeError as error:
        raise WorkerLostError((failed or keeper.failed)(reason(error))) from None


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

    Attributes:
        keeper: The process that keeps the store.
    """

    def __init__(self, store: Store) -> None:
        self.keeper = keeper_of(store, os.environ)
        self._silent = False
        self._cut = False
        self._connection = dict[int, int]()
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[Store], Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, args=(store,), daemon=True, name="evenstep-store")
        self._thread.start()

    def ask(self, call: Callable[[Store], Result]) -> "Future[Result]":
        """Queue the call behind earlier ones."""
        made: Future[Result] = Future()
        self._calls.put((made, call))
        return made

    def call(self, call: Callable[[Store], Result], seconds: float) -> Result:
        """Return the result of the call; WorkerLostError if it, or an earlier one, did not return in time or failed."""
        if self._silent:
            raise self.keeper.unreachable()
        try:
            return self.ask(call).result(seconds)
        except TimeoutError:
            self._silent = True
            raise self.keeper.unreachable() from None

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
                # On a busy machine the thread of a call that was cut off takes a while.
                self._thread.join(30.0 if self._connection else _CLOSE_SECONDS)

    def _serve(self, store: Store) -> None:
        own: Store | None = None
        with suppress(OSError, RuntimeError):
            address = address_of(store)
            before = {} if address is None else connections(address[1])
            own = store.clone()  # type: ignore[attr-defined]
            after = {} if address is None else connections(address[1])
            self._connection = {inode: number for inode, number in after.items() if inode not in before}
        while (asked := self._calls.get()) is not None:
            _make(asked[0], lambda: self._answer(own, asked[1]))

    def _answer(self, store: Store | None, call: Callable[[Store], Result]) -> Result:
        # A call on a connection that is closed would print a stack of c10d's.
        if store is None or self._cut or any(map(is_closed, self._connection.values())):
            raise self.keeper.gone()
        try:
            return call(store)
        except RuntimeError as error:
            raise self.keeper.gone() from error


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
    """Return where the store listens; None if it is not a TCPStore."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None
