"""The meeting of the workers of one start: unused keys of a store, and a roll call in them.

torchrun's agent keeps one store for all starts of its workers (seen in torch 2.13), and restarted workers find the
addresses that those before them left there. So they first agree on a new prefix.
"""

import itertools
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, final

import torch.distributed as dist

from evenstep.core.activity import FIRST_PULSE
from evenstep.core.disagreement import NOTHING_ASKED, require_same_way
from evenstep.core.errors import ConfigError, EvenstepError, WorkerLostError
from evenstep.core.workers import name_workers
from evenstep.launch.c10d import PrefixStore, Store, TCPStore, reason
from evenstep.torch.processes.store_line import StoreKeeper, bounded, keeper_of

VERDICT: Final = "verdict"
"""The key of the sentence that says which worker is lost, once a worker knows."""

_CONNECT_SECONDS: Final = 5.0  # Where the network works, connecting takes milliseconds.
_MAX_POLL_SECONDS: Final = 0.25  # So a thousand workers ask one store 4,000 times a second.

_kept: Final[list[Store]] = []
"""The stores of this process: others may use one after an error, which the script may catch."""

_meetings = itertools.count(1)
"""Numbers the calls of `prepare`, each of which uses its own keys. All workers must call it equally often."""


def meet(
    rank: int,
    count: int,
    timeout_seconds: float,
    environment: Mapping[str, str] = os.environ,
    *,
    asked: Mapping[str, object] = NOTHING_ASKED,
    group: str = "",
) -> tuple[Store, list[dict[str, Any]]]:
    """Meet the other workers in the default group's store, or in the environment's if there is no group yet.

    Args:
        rank: This worker's rank.
        count: Number of workers.
        timeout_seconds: How long to wait for the others.
        environment: torchrun's environment.
        asked: What this worker is asked to join, in the form of `require_same_way`; it may say more.
        group: The name of the process group whose members meet; empty for all workers.

    Returns:
        A part of that store for this meeting alone, with a first pulse of every worker; and what each was asked.

    Raises:
        ConfigError: The store cannot be made where the environment says, or a worker was asked for something wrong.
        DisagreementError: Some workers would join servers and others not.
        WorkerLostError: Not all workers came within the timeout, or the store does not answer; it names the missing.
    """
    number = next(_meetings)
    base = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    keeper = keeper_of(base, environment)
    place = _Place(
        rank=rank,
        count=count,
        seconds=timeout_seconds,
        ends=time.monotonic() + timeout_seconds,
        keeper=keeper,
        asked=json.dumps(dict(asked)),
    )

    def come() -> tuple[Store, list[bytes]]:
        if base is None and keeper.worker is None:
            store = place.meet_under_new_prefix(PrefixStore(f"evenstep/{number}", place.join()))
        else:
            prefix = f"evenstep/{number}/{group}" if group else f"evenstep/{number}"
            store = PrefixStore(prefix, base or (place.join() if rank else place.make()))
            place.call_roll(store)
        return store, store.multi_get([f"asked/{each}" for each in range(count)])

    store, texts = bounded(come, timeout_seconds, keeper)
    told = [json.loads(each) for each in texts]
    try:
        require_same_way(told, rank)
    except EvenstepError:
        if keeper.worker == rank:
            _let_others_read()
        raise
    return store, told


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The place at which this worker meets the others, and the deadline by `time.monotonic`."""

    rank: int
    count: int
    seconds: float
    ends: float
    keeper: StoreKeeper
    asked: str

    def polls(self) -> Iterator[None]:
        """Yield once for each look at the store, at growing intervals, until the time is over."""
        pause = 0.01  # Workers of one start mostly come within milliseconds of each other.
        while True:
            yield
            if time.monotonic() > self.ends:
                return
            time.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_SECONDS)

    def make(self) -> Store:
        """Make the store, which this process keeps."""
        try:
            _kept.append(self._store(is_master=True))
        except RuntimeError as error:
            why = str(error).partition("message: ")[2] or reason(error)
            raise ConfigError(
                f"the rendezvous store cannot be made at {self.keeper.host}:{self.keeper.port} ({why}): set"
                " MASTER_ADDR to this host and MASTER_PORT to a free port"
            ) from None
        return _kept[-1]

    def join(self) -> Store:
        """Connect to the store once its keeper is there. Python connects first, since c10d's attempts print stacks."""
        why = ""
        for _ in self.polls():
            try:
                socket.create_connection((self.keeper.host, self.keeper.port), timeout=_CONNECT_SECONDS).close()
                return self._store(is_master=False)
            except OSError as error:
                why = error.strerror or str(error)
        raise WorkerLostError(
            f"{self.keeper} has not come within {self.seconds:g} s, has ended, or cannot be reached ({why}): look at"
            " its output and check MASTER_ADDR and MASTER_PORT, then start again"
        )

    def _store(self, *, is_master: bool) -> Store:
        return TCPStore(
            self.keeper.host,
            self.keeper.port,
            self.count,
            is_master=is_master,
            timeout=timedelta(seconds=self.seconds),
            wait_for_workers=False,  # A worker that does not come would not be named.
            multi_tenant=self.keeper.worker is not None,
            master_listen_fd=_loopback_listener(self.keeper.host, self.keeper.port) if is_master else None,
        )

    def call_roll(self, store: Store, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Announce this worker, and wait until all are here; if some do not come, all workers raise the same error."""
        keys = [str(each) for each in range(self.count)]
        store.set(f"asked/{self.rank}", self.asked)
        store.set(keys[self.rank], FIRST_PULSE.to_text())
        for _ in self.polls():
            meanwhile()
            if store.check(keys):
                return
            if store.check([VERDICT]):
                raise WorkerLostError(store.get(VERDICT).decode())
        missing = [each for each, key in enumerate(keys) if not store.check([key])]
        if missing:
            have, their = ("have", "their") if len(missing) > 1 else ("has", "its")
            text = (
                f"{name_workers(missing)} {have} not come to prepare within {self.seconds:g} s: look at {their} output,"
                " then start again"
            )
            store.set(VERDICT, text)
            _let_others_read()
            raise WorkerLostError(text)

    def meet_under_new_prefix(self, store: Store) -> Store:
        """Worker 0 draws the prefix, and answers every worker that says hello until all have come.

        Hellos of dead workers are answered too; no worker reads these answers.
        """
        if self.rank == 0:
            prefix, answered = uuid.uuid4().hex, set[str]()
            met = PrefixStore(prefix, store)
            self.call_roll(met, lambda: self._answer_hellos(store, prefix, answered))
            return met
        name = uuid.uuid4().hex
        store.set(f"hello/{self.rank}", name)
        for _ in self.polls():
            if store.check([f"life/{name}"]):
                met = PrefixStore(store.get(f"life/{name}").decode(), store)
                self.call_roll(met)
                return met
        raise WorkerLostError(
            f"worker 0 was not in prepare within {self.seconds:g} s: it has not come there, or it no longer waited for"
            " this worker; look at its output, then start again"
        )

    def _answer_hellos(self, store: Store, prefix: str, answered: set[str]) -> None:
        for hello in (f"hello/{rank}" for rank in range(1, self.count)):
            name = store.get(hello).decode() if store.check([hello]) else None
            if name is not None and name not in answered:
                store.set(f"life/{name}", prefix)
                answered.add(name)


def _let_others_read() -> None:
    """Wait for the others to read the store, which may end with this process."""
    time.sleep(4 * _MAX_POLL_SECONDS)


def _loopback_listener(host: str, port: int) -> int | None:
    """Return the descriptor of a socket for a store at this address, which listens on loopback alone.

    None if the host is not this one's loopback, or the port is taken: by another store of this process, which PyTorch
    then shares, or by another process, which PyTorch then reports.
    """
    try:
        number = socket.gethostbyname(host)
        return socket.create_server((number, port)).detach() if number.startswith("127.") else None
    except OSError:
        return None
