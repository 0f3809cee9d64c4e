"""Finds out which worker is missing after a collective has failed.

A failed collective tells that somebody is gone, seldom who. So every worker counts up a number of its own in the
process group's store, from a thread, and after a failure the survivors look whose number stands still. A worker that
only waits in a collective goes on counting; one that was killed or stopped does not.
"""

import re
import threading
from collections.abc import Callable
from typing import final

import torch.distributed as dist

from evenstep.core.errors import EvenstepError, WorkerLostError
from evenstep.runtime.c10d import PrefixStore, Store
from evenstep.runtime.workers import Workers, name_workers

BEAT_SECONDS = 0.4


@final
class Liveness:
    """This worker's pulse, and a look at the others' after a failure. The thread ends with the main thread."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        # The store of the default group is the one that outlives a worker under torchrun, whose agent keeps it. It has
        # no public name. A client serves one caller at a time, hence a clone for the thread.
        store = dist.distributed_c10d._get_default_store()
        self._store = PrefixStore("evenstep/pulse", store)
        self._closed = threading.Event()
        pulse = PrefixStore("evenstep/pulse", store.clone())  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._beat, args=(pulse,), name="evenstep-pulse")
        self._beats = 0
        self._count(self._store)
        self._thread.start()

    def _count(self, store: Store) -> None:
        self._beats += 1
        store.set(str(self._workers.rank), str(self._beats))

    def _beat(self, store: Store) -> None:
        main = threading.main_thread()
        while main.is_alive() and not self._closed.is_set():
            try:
                self._count(store)
            except RuntimeError:
                return  # The store is gone, and with it everybody who could ask.
            # Joining the main thread is a sleep that ends early when the script does.
            main.join(BEAT_SECONDS)

    def close(self) -> None:
        """Stop counting."""
        self._closed.set()

    def lost(self, cause: Exception, wait: Callable[[float], None]) -> WorkerLostError:
        """The error to raise after a collective failed with `cause`; takes a few beats."""
        before = self._pulses()
        wait(3 * BEAT_SECONDS)
        after = self._pulses()
        if before is None or after is None:
            who = "the process that keeps the rendezvous store (rank 0, or torchrun's agent)"
        else:
            still = [rank for rank in range(self._workers.count) if before[rank] == after[rank]]
            still = [rank for rank in still if rank != self._workers.rank]
            if not still:
                return WorkerLostError(
                    "a collective failed although every worker is alive: some worker left the training loop earlier"
                    " than the others, or called alone what all must call (mean_over_workers, checkpoint.save), or its"
                    f" network failed; give all the same iterations and calls ({_line(cause)})"
                )
            who = name_workers(still)
        return WorkerLostError(
            f"{who} ended, died, stopped or did not answer within {self._workers.timeout_seconds:g} s:"
            f" look at its output, then start again ({_line(cause)})"
        )

    def _pulses(self) -> list[bytes] | None:
        try:
            return self._store.multi_get([str(rank) for rank in range(self._workers.count)])
        except RuntimeError:
            return None


def explained(cause: Exception, liveness: Liveness | None, wait: Callable[[float], None]) -> EvenstepError:
    """An error of the communication library as one that says who is missing; one of evenstep's as it is."""
    if isinstance(cause, EvenstepError):
        return cause
    return WorkerLostError(f"a collective failed: {cause}") if liveness is None else liveness.lost(cause, wait)


def _line(cause: Exception) -> str:
    """The first sentence of an error of the communication library, without its place in that library's source."""
    line = str(cause).strip().split("\n")[0]
    return re.sub(r"^\[[^]]*\.cc:\d+\] ", "", line).partition(". ")[0].rstrip(".")
