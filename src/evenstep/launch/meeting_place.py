"""Where the workers of one life meet: keys of a store that no others have used, and a roll call in them.

torchrun's agent keeps one store for all lives of its workers (seen in torch 2.13), and those of a new life find the
addresses that the dead ones left in it. So they first agree on a prefix that is new.
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
from typing import Final, final

import torch.distributed as dist

from evenstep.core.activity import FIRST_PULSE
from evenstep.core.disagreement import NOTHING_ASKED, require_same_way
from evenstep.core.errors import ConfigError, EvenstepError, WorkerLostError
from evenstep.core.workers import name_workers
from evenstep.launch.c10d import PrefixStore, Store, TCPStore, reason
from evenstep.launch.loopback import loopback_listener
from evenstep.launch.store_line import Result, StoreKeeper, within

FRESH_STORE: Final = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
"""Tells torchrun's agent to let the workers make a new store in each life (pytorch/pytorch#135712)."""

VERDICT: Final = "verdict"
"""The key of the sentence that says who is lost, once a worker knows."""

GRACE_SECONDS: Final = 5.0
"""How much longer than its own limit a wait may take where the store does not answer at all."""

_FIRST_POLL_SECONDS: Final = 0.01
_LONGEST_POLL_SECONDS: Final = 0.25
_CONNECT_SECONDS: Final = 5.0

_kept: Final[list[Store]] = []
"""The stores that this process keeps: others may use one after an error, which the script may catch."""

_meetings = itertools.count(1)
"""Numbers the calls of `prepare`, each of which uses its own keys. All workers must call it equally many times."""


def meet(
    rank: int,
    count: int,
    timeout_seconds: float,
    environment: Mapping[str, str] = os.environ,
    *,
    asked: Mapping[str, object] = NOTHING_ASKED,
) -> Store:
    """Meet the other workers in the default group's store, or in the environment's where there is no group yet.

    Args:
        rank: This worker's.
        count: Workers.
        timeout_seconds: How long to wait for the others.
        environment: torchrun's.
        asked: What this worker is to join, as `require_same_way` has it.

    Returns: A part of that store for this meeting alone, with a first pulse of every worker.

    Raises:
        ConfigError: The store cannot be made where the environment says, or a worker was asked for something wrong.
        DisagreementError: Some workers would join servers and others not.
        WorkerLostError: Not all workers came within the timeout, or the store does not answer; it says who.
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
            store = _meet_in_new_life(PrefixStore(f"evenstep/{number}", place.join()), place)
        else:
            store = PrefixStore(f"evenstep/{number}", base or (place.join() if rank else place.make()))
            _call_roll(store, place)
        return store, store.multi_get([f"asked/{each}" for each in range(count)])

    store, told = bounded(come, timeout_seconds, keeper)
    try:
        require_same_way([json.loads(each) for each in told], rank)
    except EvenstepError:
        if keeper.worker == rank:
            _let_others_read()
        raise
    return store


def keeper_of(store: Store | None, environment: Mapping[str, str]) -> StoreKeeper:
    """Who keeps this store, or the environment's.

    Raises:
        ConfigError: The environment has no port.
    """
    if store is not None:
        return StoreKeeper.of(store, environment)
    port = environment["MASTER_PORT"]
    if not port.isdigit():
        raise ConfigError(f"MASTER_PORT must be a port's number, not {port!r}: start the script with torchrun")
    return StoreKeeper.named(environment["MASTER_ADDR"], int(port), environment)


def bounded(call: Callable[[], Result], seconds: float, keeper: StoreKeeper) -> Result:
    """What a call returns that uses the store; it ends within that many seconds by itself where the store answers.

    Raises:
        WorkerLostError: It did not return, or failed at the store.
    """
    try:
        return within(seconds + GRACE_SECONDS, call)
    except TimeoutError:
        raise WorkerLostError(keeper.unreachable()) from None
    except EvenstepError:
        raise
    except RuntimeError as error:
        raise WorkerLostError(
            f"{keeper} ended, or did not go on in time ({reason(error)}): look at the output of all workers, then start"
            " again"
        ) from None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where and until when, on the clock `time.monotonic`, this worker meets the others."""

    rank: int
    count: int
    seconds: float
    ends: float
    keeper: StoreKeeper
    asked: str

    def looks(self) -> Iterator[None]:
        """One item for each look at the store, at ever longer intervals, until the time is over."""
        pause = _FIRST_POLL_SECONDS
        while True:
            yield
            if time.monotonic() > self.ends:
                return
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL_SECONDS)

    def make(self) -> Store:
        """The store, kept by this process."""
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
        """The store, once its keeper is there. It is tried in Python, since c10d's own tries print stacks."""
        why = ""
        for _ in self.looks():
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
            # A worker that does not come would be missed without a name.
            wait_for_workers=False,
            multi_tenant=self.keeper.worker is not None,
            master_listen_fd=loopback_listener(self.keeper.host, self.keeper.port) if is_master else None,
        )


def _call_roll(store: Store, place: _Place, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Say that this worker is here, and wait until all are.

    Raises:
        WorkerLostError: Some did not come in time; it names them, and all workers say the same.
    """
    keys = [str(each) for each in range(place.count)]
    store.set(f"asked/{place.rank}", place.asked)
    store.set(keys[place.rank], FIRST_PULSE.to_text())
    for _ in place.looks():
        meanwhile()
        if store.check(keys):
            return
        if store.check([VERDICT]):
            raise WorkerLostError(store.get(VERDICT).decode())
    missing = [each for each, key in enumerate(keys) if not store.check([key])]
    if missing:
        have = "have" if len(missing) > 1 else "has"
        text = (
            f"{name_workers(missing)} {have} not come to prepare within {place.seconds:g} s: look at"
            f" {'their' if len(missing) > 1 else 'its'} output, then start again"
        )
        store.set(VERDICT, text)
        _let_others_read()
        raise WorkerLostError(text)


def _let_others_read() -> None:
    """The store may end with this process, and the others are to read first what it says."""
    time.sleep(4 * _LONGEST_POLL_SECONDS)


def _meet_in_new_life(store: Store, place: _Place) -> Store:
    """Worker 0 names the life, and tells the name to every worker that says hello until all have come.

    Hellos of the dead are answered too; no worker reads these answers.
    """
    if place.rank == 0:
        life, answered = uuid.uuid4().hex, set[str]()
        met = PrefixStore(life, store)
        _call_roll(met, place, lambda: _answer_hellos(store, place.count, life, answered))
        return met
    name = uuid.uuid4().hex
    store.set(f"hello/{place.rank}", name)
    for _ in place.looks():
        if store.check([f"life/{name}"]):
            met = PrefixStore(store.get(f"life/{name}").decode(), store)
            _call_roll(met, place)
            return met
    raise WorkerLostError(
        f"worker 0 was not in prepare within {place.seconds:g} s: it has not come there, or it no longer waited for"
        " this worker; look at its output, then start again"
    )


def _answer_hellos(store: Store, count: int, life: str, answered: set[str]) -> None:
    for hello in (f"hello/{rank}" for rank in range(1, count)):
        name = store.get(hello).decode() if store.check([hello]) else None
        if name is not None and name not in answered:
            store.set(f"life/{name}", life)
            answered.add(name)
