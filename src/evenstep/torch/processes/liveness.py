"""Finds out which worker is missing: after a collective has failed, and while one takes long.

A failed collective shows that a worker is gone, but seldom which one. So each worker has a counter in the rendezvous
store, which a thread increments, with what the main thread last did. After a failure the survivors look for a counter
that stands still, or else for a worker that is behind the others. The first one that knows writes the sentence to the
store, and the others repeat it. While a collective takes long, the same thread looks at the others. If one of them is
lost, it ends the connections of this process's groups, so that the collective fails.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, final

from evenstep.core.activity import Pulse, behind, silent
from evenstep.core.errors import EvenstepError, WorkerLostError
from evenstep.core.lookout import Lookout, kept_waiting, needs_all
from evenstep.core.workers import name_workers
from evenstep.launch.c10d import Store, of_communication, of_data_worker, reason
from evenstep.launch.connections import cut
from evenstep.launch.meeting_place import VERDICT, keeper_of
from evenstep.launch.store_line import StoreGoneError, StoreLine, StoreSilentError
from evenstep.launch.watch import is_stopped
from evenstep.torch.processes.workers import Workers
from evenstep.worker.activity import Activity

BEAT_SECONDS: Final = 0.4
_POLL_SECONDS: Final = 3 * BEAT_SECONDS
_ANSWER_SECONDS: Final = 4.0
"""How long the store may take to answer: a machine may be busy, and the user's timeout is over by now."""


@final
class Liveness:
    """This worker's pulse, and a look at the others' after a failure. Its thread ends with the main thread."""

    def __init__(self, workers: Workers, activity: Activity, silent_seconds: float) -> None:
        assert workers.store is not None
        self._workers = workers
        self._activity = activity
        self._keeper = keeper_of(workers.store, os.environ)
        self._line = StoreLine(workers.store)
        self._lookout = Lookout(
            workers.rank,
            workers.machines,
            silent_seconds=silent_seconds,
            timeout_seconds=workers.timeout_seconds,
        )
        self._verdict: str | None = None
        self._failed = False
        self._closed = threading.Event()
        self._beats = 0
        # Not a daemon, so that it closes the store's connection before the interpreter ends. It never waits for the
        # store.
        threading.Thread(target=self._live, name="evenstep-pulse").start()

    def _live(self) -> None:
        main = threading.main_thread()
        beat = self._line.ask(self._beat)
        while main.is_alive() and not self._closed.is_set():
            main.join(BEAT_SECONDS)  # A sleep that ends early when the script does.
            done = beat.done() and beat.exception() is None
            self._look(beat.result() if done else None)
            if beat.done():
                beat = self._line.ask(self._beat)
        if self._failed and self._keeper.worker == self._workers.rank:
            # The store ends with this process, and the others are to read the reason first.
            self._closed.wait(_POLL_SECONDS)
        self._line.close()

    def _beat(self, store: Store) -> dict[int, Pulse] | None:
        """Increment the counter, and read whether another worker has failed, which the store may not outlive.

        Returns the others' pulses, if the main thread waits for the others or may do so.
        """
        self._beats += 1
        seen = self._activity.read()
        store.set(str(self._workers.rank), Pulse(beats=self._beats, seen=seen).to_text())
        self._read_verdict(store)
        return self._pulses(store) if needs_all(seen) else None

    def _look(self, pulses: dict[int, Pulse] | None) -> None:
        """While the main thread waits, look whether that is in vain; if so, end its wait."""
        own, workers = self._activity.read(), self._workers
        waits = needs_all(own)
        here = [rank for rank, machine in enumerate(workers.machines) if machine == workers.machines[workers.rank]]
        stopped = [rank for rank in here if waits and is_stopped(workers.pids[rank])]
        lost = self._lookout.look(own, time.monotonic(), stopped=stopped, pulses=pulses)
        if lost is not None and self._verdict is None:
            self._verdict = lost
            self._line.ask(lambda store: self._put(store, lost))
        if waits and self._verdict is not None:
            cut(workers.connections)

    def _read_verdict(self, store: Store) -> None:
        if self._verdict is None and store.check([VERDICT]):
            self._verdict = store.get(VERDICT).decode()

    def close(self) -> None:
        """Stop the pulse."""
        self._closed.set()

    def tell(self, text: str) -> None:
        """This worker fails for this reason: tell the others, unless a worker has failed before."""
        self._failed = True
        with suppress(StoreSilentError, StoreGoneError):
            self._line.call(lambda store: self._put(store, text), _ANSWER_SECONDS)

    def _put(self, store: Store, text: str) -> None:
        if not store.check([VERDICT]):
            store.set(VERDICT, text)

    def lost(self, cause: Exception, wait: Callable[[float], None]) -> WorkerLostError:
        """The error to raise after a collective failed with `cause`; takes a few beats, unless a data worker died."""
        with self._activity.waiting():
            text = self._of_data_worker if of_data_worker(cause) else self._verdict or self._found(wait)
            self.tell(text)
        return WorkerLostError(f"{text} ({reason(cause)})")

    @property
    def _of_data_worker(self) -> str:
        return (
            f"a data worker of worker {self._workers.rank} was killed, as a system does that is out of memory: give it"
            " fewer or smaller data workers (num_workers, prefetch_factor), then start again"
        )

    def _found(self, wait: Callable[[float], None]) -> str:
        try:
            before = self._line.call(self._pulses, _ANSWER_SECONDS)
            wait(_POLL_SECONDS)
            after = self._line.call(self._pulses, _ANSWER_SECONDS)
        except StoreSilentError:
            return self._keeper.unreachable()
        except StoreGoneError:
            return self._verdict or (
                f"{self._keeper} is gone, and which worker failed first cannot be told any more: look at the output of"
                " all workers, then start again"
            )
        return self._verdict or self._missing(before, after)

    def _pulses(self, store: Store) -> dict[int, Pulse]:
        """The other workers'."""
        self._read_verdict(store)
        others = [rank for rank in range(self._workers.count) if rank != self._workers.rank]
        texts = store.multi_get([str(rank) for rank in others])
        return {rank: Pulse.from_text(text.decode()) for rank, text in zip(others, texts, strict=True)}

    def _missing(self, before: dict[int, Pulse], after: dict[int, Pulse]) -> str:
        timeout = self._workers.timeout_seconds
        if gone := silent(before, after):
            return (
                f"{name_workers(gone)} ended, died, stopped or did not answer within {timeout:g} s: look at its output,"
                " then start again"
            )
        seen = {rank: pulse.seen for rank, pulse in after.items()}
        seen[self._workers.rank] = self._activity.read()
        waited = [rank for rank in behind(seen, least_seconds=timeout / 4) if rank != self._workers.rank]
        if waited:
            return kept_waiting({rank: seen[rank] for rank in waited})
        return (
            "a collective failed although every worker is alive: some worker left the training loop earlier than the"
            " others, or called alone what all must call (mean_over_workers, checkpoint.save), or its network failed;"
            " give all the same iterations and calls"
        )


@contextmanager
def explaining(liveness: Liveness | None) -> Iterator[None]:
    """Errors of the communication library that are raised inside name the missing worker."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, EvenstepError) or not of_communication(error):
            raise
        raise explained(error, liveness, time.sleep) from error


def explained(cause: Exception, liveness: Liveness | None, wait: Callable[[float], None]) -> EvenstepError:
    """An error of the communication library as one that names the missing worker; an EvenstepError as it is."""
    if isinstance(cause, EvenstepError):
        return cause
    return WorkerLostError(f"a collective failed: {cause}") if liveness is None else liveness.lost(cause, wait)
