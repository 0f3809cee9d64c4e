"""Says at the end of a run how it went, without a run directory too."""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

import numpy as np

from evenstep.core.account import Account, Meetings, summary_lines
from evenstep.core.values import IntArray, Reports
from evenstep.telemetry import Recorder
from evenstep.worker.iteration import Iteration

_AT_ONCE: Final = 64
"""Iterations that are summed up together, so that an iteration costs next to nothing."""


@final
class Summary:
    """A `Recorder` that passes everything on, and says a few lines when it is no longer used or its process ends.

    Nothing is said after an exception has ended the script, also where the run was closed before. Totals are kept in
    memory that does not grow with the run.

    Args:
        recorder: Gets all events.
        workers: How many workers the run has.
        global_batch_size: The samples of one iteration over all of them.
        scheme: The name of its scheme.
        say: Takes a line.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        workers: int,
        global_batch_size: int,
        scheme: str,
        say: Callable[[str], None],
    ) -> None:
        self._recorder = recorder
        self._sums = _Sums(workers, global_batch_size)
        # A training script has no place where it would close what `prepare` opened.
        self._finish = weakref.finalize(self, _say_lines, self._sums, scheme, say, os.getpid())

    def record(self, event: Mapping[str, object]) -> None:
        """Pass on an event."""
        self._recorder.record(event)

    def take(self, done: Iteration, reports: Reports, outside: IntArray, ended: float) -> None:
        """All workers have met in this iteration of the first worker, which ended then.

        `outside` has the shape [workers, 2]: everybody's microseconds of waiting for input, and of the script's own.
        """
        self._sums.take(done, reports, outside, ended)

    def close(self) -> None:
        """Nothing more will come; how the script ends decides whether the lines are said."""
        self._recorder.close()

    def drop(self) -> None:
        """The script has failed: say nothing."""
        self._finish.detach()


@final
class _Sums:
    """Iterations as one worker sees them, on their way into an account."""

    def __init__(self, workers: int, global_batch_size: int) -> None:
        self._account = Account(workers, global_batch_size)
        self._waiting: list[tuple[Iteration, Reports, IntArray, float]] = []

    def take(self, done: Iteration, reports: Reports, outside: IntArray, ended: float) -> None:
        self._waiting.append((done, reports, outside, ended))
        if len(self._waiting) == _AT_ONCE:
            self.finish()

    def finish(self) -> Account:
        if self._waiting:
            self._account.take(_meetings(self._waiting))
            self._waiting.clear()
        return self._account


def _meetings(taken: Sequence[tuple[Iteration, Reports, IntArray, float]]) -> Meetings:
    """What all workers did, from their reports and the first worker's clock.

    All workers leave a meeting together, so each has spent as long as the first one since the meeting before.
    """
    passes = np.array([done.passes for done, *_ in taken])
    compute = np.stack([reports.compute_microseconds for _, reports, *_ in taken], axis=1) * passes / 1e6
    inputs, script = np.stack([outside for *_, outside, _ in taken], axis=2).transpose(1, 0, 2) / 1e6
    own = np.stack([compute, inputs, script])
    spent = own.sum(axis=0)
    met = np.array([done.synchronised_seconds for done, *_ in taken]) + spent[0] - spent
    met = np.maximum(met, 0.0)
    wait = np.minimum(spent.max(axis=0) - spent, met)
    return Meetings(
        samples=(np.stack([done.share.sizes for done, *_ in taken], axis=1) * passes).astype(np.float64),
        own=own,
        wait=wait,
        comm=met - wait,
        seconds=np.array([ended - done.entered for done, *_, ended in taken]),
        bases=tuple(done.basis for done, *_ in taken),
    )


def _say_lines(sums: _Sums, scheme: str, say: Callable[[str], None], process: int) -> None:
    # A fork of the process (a data worker) has all of this too, and its end is not the run's.
    if os.getpid() == process:
        for line in summary_lines(sums.finish(), scheme):
            say(line)
