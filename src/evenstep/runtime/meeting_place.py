"""Where the workers of one life meet, when torchrun has started them again.

torchrun's agent keeps one store for all lives of its workers (seen in torch 2.13), and those of a new life find the
addresses that the dead ones left in it. So they first agree on a prefix that is new.
"""

import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Final

from evenstep.core.errors import WorkerLostError
from evenstep.runtime.c10d import PrefixStore, Store, TCPStore

FRESH_STORE: Final = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
"""Tells torchrun's agent to let the workers make a store of their own in each life (pytorch/pytorch#135712)."""

_LOOK_SECONDS: Final = 0.02


def meeting_place(environment: Mapping[str, str], limit: timedelta) -> Store | None:
    """A store that nobody has used before; None where torchrun's agent does not share its own.

    Raises:
        WorkerLostError: Not all workers came.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    rank, count = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    store = TCPStore(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), count, is_master=False, timeout=limit)
    try:
        life = _lead(store, count, limit) if rank == 0 else _follow(store, rank)
    except (RuntimeError, TimeoutError) as error:
        raise WorkerLostError(
            f"not all {count} workers came within {limit.total_seconds():g} s: look at their output, then start again"
        ) from error
    return PrefixStore(f"evenstep/{life}", store)


def _lead(store: Store, count: int, limit: timedelta) -> str:
    """Worker 0 names the life, and greets whoever says hello until all have understood.

    Hellos of the dead are greeted too; nobody hears it.
    """
    life, greeted = uuid.uuid4().hex, set[str]()
    understood = [f"evenstep/understood/{life}/{rank}" for rank in range(1, count)]
    hellos = [f"evenstep/hello/{rank}" for rank in range(1, count)]
    ends = time.monotonic() + limit.total_seconds()
    while understood and not store.check(understood):
        for hello in hellos:
            name = store.get(hello).decode() if store.check([hello]) else None
            if name is not None and name not in greeted:
                store.set(f"evenstep/greeting/{name}", life)
                greeted.add(name)
        if time.monotonic() > ends:
            raise TimeoutError("not everybody has answered")
        time.sleep(_LOOK_SECONDS)
    return life


def _follow(store: Store, rank: int) -> str:
    name = uuid.uuid4().hex
    store.set(f"evenstep/hello/{rank}", name)
    life = store.get(f"evenstep/greeting/{name}").decode()
    store.set(f"evenstep/understood/{life}/{rank}", "")
    return life
