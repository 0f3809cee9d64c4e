"""Finds out which worker is missing, after a collective has failed or while one takes long.

A failed collective shows that a worker is gone, but seldom which one. So each worker has a counter in the rendezvous
store, which a thread increments, next to the main thread's last activity. After a failure the survivors look for a
counter that stands still, or else for a worker that is behind the others. The first one to find it writes the message
to the store, and the others repeat it. While a collective takes long, the same thread watches the others. If one of
them is lost, it ends this process's connections, so that the collective fails, also one of the script's own groups.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, final

from evenstep.core.activity import Pulse
from evenstep.core.errors import EvenstepError, WorkerLostError
from evenstep.core.lookout import Lookout, needs_all
from evenstep.launch.c10d import Store, of_communication, of_data_worker, reason
from evenstep.launch.watch import is_stopped
from evenstep.torch.processes.connections import connections, cut
from evenstep.torch.processes.meeting_place import VERDICT
from evenstep.torch.processes.store_line import StoreLine
from evenstep.torch.processes.workers import Workers
from evenstep.worker.activity import Activity

BEAT_SECONDS: Final = 0.4
_POLL_SECONDS: Final = 3 * BEAT_SECONDS
_LAST_SECONDS: Final = 0.05
"""The time that messages under way get when the script has ended."""
_ANSWER_SECONDS: Final = 4.0
"""The time that the store may take to answer: a machine may be busy, and the user's timeout is over by now."""


@final
class Liveness:
    """This process's pulse, and a look at the others' after a failure. Its thread ends with the main thread.

    `rank` is that of the process; messages name processes, where workers have several.
    """

    def __init__(self, workers: Workers, activity: Activity, silent_seconds: float) -> None:
        assert workers.store is not None
        self.rank = workers.rank
        self._workers = workers
        self._activity = activity
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
            main.join(BEAT_SECONDS)  # Sleeps, but wakes up early when the script ends.
            done = beat.done() and beat.exception() is None
            self._look(beat.result() if done else None)
            if beat.done():
                beat = self._line.ask(self._beat)
        if self._failed and self._line.keeper.worker == self._workers.rank:
            # The store ends with this process, but the others must read the reason first.
            self._closed.wait(_POLL_SECONDS)
        self._closed.wait(_LAST_SECONDS)
        if not self._closed.is_set():
            cut(self._workers.connections)  # What the script did not wait for must fail before the interpreter ends.
        self._line.close()

    def _beat(self, store: Store) -> dict[int, Pulse] | None:
        """Increment the counter, and check if another worker has failed, as the store may end with that worker.

        Returns the others' pulses if the main thread waits for the others or may do so.
        """
        self._beats += 1
        seen = self._activity.read()
        store.set(str(self._workers.rank), Pulse(beats=self._beats, seen=seen).to_text())
        self._read_verdict(store)
        return self._pulses(store) if needs_all(seen) else None

    def _look(self, pulses: dict[int, Pulse] | None) -> None:
        """End the main thread's wait if a worker that it waits for is lost."""
        own, workers = self._activity.read(), self._workers
        waits = needs_all(own)
        here = [rank for rank, machine in enumerate(workers.machines) if machine == workers.machines[workers.rank]]
        stopped = [rank for rank in here if waits and is_stopped(workers.pids[rank])]
        lost = self._lookout.look(own, time.monotonic(), stopped=stopped, pulses=pulses)
        if lost is not None and self._verdict is None:
            self._verdict = said = self._workers.named(lost)
            self._line.ask(lambda store: self._put(store, said))
        if waits and self._verdict is not None:
            cut(connections().keys() - connections(self._line.keeper.port, served=True).keys())

    def _read_verdict(self, store: Store) -> None:
        if self._verdict is None and store.check([VERDICT]):
            self._verdict = store.get(VERDICT).decode()

    def close(self) -> None:
        """Stop the pulse."""
        self._closed.set()

    def tell(self, text: str) -> None:
        """Tell the others why this worker fails, unless another worker has failed before."""
        self._failed = True
        with suppress(WorkerLostError):
            self._line.call(lambda store: self._put(store, self._workers.named(text)), _ANSWER_SECONDS)

    def _put(self, store: Store, text: str) -> None:
        if not store.check([VERDICT]):
            store.set(VERDICT, text)

    def lost(self, cause: Exception) -> WorkerLostError:
        """The error to raise after a collective failed with `cause`; takes a few beats, unless a data worker died."""
        with self._activity.waiting():
            if of_data_worker(cause):
                said = (
                    f"a data worker of worker {self._workers.rank} was killed, as a system does that is out of memory:"
                    " give it fewer or smaller data workers (num_workers, prefetch_factor), then start again"
                )
            else:
                said = self._verdict or self._found()
            text = self._workers.named(said)
            self.tell(text)
        return WorkerLostError(f"{text} ({reason(cause)})")

    def _found(self) -> str:
        try:
            before = self._line.call(self._pulses, _ANSWER_SECONDS)
            time.sleep(_POLL_SECONDS)
            after = self._line.call(self._pulses, _ANSWER_SECONDS)
        except WorkerLostError as error:
            return self._verdict or str(error)
        return self._verdict or self._lookout.after_failure(self._activity.read(), before, after)

    def _pulses(self, store: Store) -> dict[int, Pulse]:
        """The pulses of the other workers."""
        self._read_verdict(store)
        others = [rank for rank in range(self._workers.count) if rank != self._workers.rank]
        texts = store.multi_get([str(rank) for rank in others])
        return {rank: Pulse.from_text(text.decode()) for rank, text in zip(others, texts, strict=True)}


@contextmanager
def explaining(liveness: Liveness | None) -> Iterator[None]:
    """Make the communication library's errors, if raised inside, name the missing worker."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, EvenstepError) or not of_communication(error):
            raise
        raise explained(error, liveness) from error


def explained(cause: Exception, liveness: Liveness | None) -> EvenstepError:
    """Turn an error of the communication library into one that names the missing worker; keep an EvenstepError."""
    if isinstance(cause, EvenstepError):
        return cause
    return WorkerLostError(f"a collective failed: {cause}") if liveness is None else liveness.lost(cause)
