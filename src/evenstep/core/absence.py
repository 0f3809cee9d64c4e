"""Which workers of a run without servers keep the others waiting, as their launcher sees it.

It sees processes: that a signal has stopped one, and that one has not come to `prepare`. What a worker does there, the
workers tell each other.
"""

from collections.abc import Collection
from typing import final

from evenstep.core.supervision import SETTLE_SECONDS, Action, End, Say


@final
class Absence:
    """Ends a worker that is stopped or does not come, and those that wait for one that has ended before it came.

    Args:
        workers: Number of workers.
        silent_seconds: How long a worker may be stopped while another runs, if the timeout is not shorter.
        timeout_seconds: How long a worker may keep others waiting in `prepare`.
    """

    def __init__(self, workers: int, *, silent_seconds: float, timeout_seconds: float) -> None:
        self._all = range(workers)
        self._stopped_seconds = min(silent_seconds, timeout_seconds)
        self._timeout_seconds = timeout_seconds
        self._since: dict[str, float] = {}
        """What is wrong, and since when; infinity once it was told."""

    def look(
        self,
        now: float,
        *,
        running: Collection[int],
        stopped: Collection[int],
        done: Collection[int],
        came: Collection[int],
    ) -> list[Action]:
        """What is to be said and done.

        Args:
            now: Seconds of any clock that does not go back.
            running: The workers whose processes run, or are stopped.
            stopped: Those whose processes are stopped.
            done: Those that have ended with exit code 0.
            came: Those that have come to `prepare`.
        """
        wrong: dict[str, tuple[float, Collection[int]]] = {}
        for worker in self._all:
            if worker in stopped and set(running) - set(stopped):
                limit = self._stopped_seconds
                how = f"stood still for {limit:g} s, stopped by a signal such as SIGSTOP: find out who sent it"
                wrong[f"worker {worker} {how}"] = limit, [worker]
            elif came and worker in running and worker not in came:
                limit = self._timeout_seconds
                wrong[f"worker {worker} did not come to prepare within {limit:g} s, and is ended"] = limit, [worker]
            elif came and worker in done and worker not in came:
                how = "ended with exit code 0 before it called prepare; the others are stopped"
                wrong[f"worker {worker} {how}"] = SETTLE_SECONDS, running
        self._since = {text: self._since.get(text, now) for text in wrong}
        actions: list[Action] = []
        for text, (limit, to_end) in wrong.items():
            if now - self._since[text] > limit:
                self._since[text] = float("inf")
                actions += [Say(text), *map(End, to_end)]
        return actions
