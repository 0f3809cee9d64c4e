"""Prints at the end of a run how it went, with or without a run directory."""

import os
import sys
import weakref
from collections.abc import Callable
from typing import Final, NamedTuple, final

import numpy as np

from evenstep.core.values import IntArray, Reports
from evenstep.report.account import Account, Meetings, summary_lines
from evenstep.worker.iteration import Iteration

_BATCH: Final = 64
"""Iterations that are added up together, so that each one costs next to nothing."""
_MOST_BARS: Final = 8
_BAR: Final = 40
"""So that a line has at most 80 characters."""


class _Meeting(NamedTuple):
    """An iteration of worker 0 in which all workers synchronised."""

    done: Iteration
    reports: Reports
    outside: IntArray
    ended: float


@final
class Summary:
    """Sums up a run on worker 0, and prints a few lines and a picture when it is no longer used or its process ends.

    It keeps totals only, in memory that does not grow with the run.

    Args:
        workers: The number of workers.
        global_batch_size: The samples of one iteration over all workers.
        scheme: The name of the scheme.
        say: Prints a line.
    """

    def __init__(self, *, workers: int, global_batch_size: int, scheme: str, say: Callable[[str], None]) -> None:
        self._sums = _Sums(workers, global_batch_size)
        # A training script has no place where it would close what `prepare` opened.
        self._finish = weakref.finalize(self, _say_lines, self._sums, scheme, say, os.getpid())

    def take(self, done: Iteration, reports: Reports, outside: IntArray, ended: float) -> None:
        """Add an iteration in which all workers synchronised.

        Args:
            done: The iteration as worker 0 saw it.
            reports: The reports of all workers.
            outside: `Iteration.outside` of each worker, in microseconds, shape [workers, 2].
            ended: When the iteration ended, on worker 0's clock.
        """
        self._sums.take(_Meeting(done, reports, outside, ended))

    @property
    def account(self) -> Account:
        """The totals so far."""
        return self._sums.finish()

    def drop(self) -> None:
        """Print nothing, because the script has failed."""
        self._finish.detach()


@final
class _Sums:
    """The totals, apart from the `Summary`, whose end is awaited."""

    def __init__(self, workers: int, global_batch_size: int) -> None:
        self._account = Account(workers, global_batch_size)
        self._waiting: list[_Meeting] = []

    def take(self, meeting: _Meeting) -> None:
        self._waiting.append(meeting)
        if len(self._waiting) == _BATCH:
            self.finish()

    def finish(self) -> Account:
        if self._waiting:
            self._account.take(_meetings(self._waiting))
            self._waiting.clear()
        return self._account


def _meetings(taken: list[_Meeting]) -> Meetings:
    """What all workers did, from their reports and worker 0's clock.

    All workers leave a synchronisation together, so each has spent as long as worker 0 since the one before.
    """
    passes = np.array([each.done.passes for each in taken])
    compute = np.stack([each.reports.compute_microseconds for each in taken], axis=1) * passes / 1e6
    inputs, script = np.stack([each.outside for each in taken], axis=2).transpose(1, 0, 2) / 1e6
    own = np.stack([compute, inputs, script])
    spent = own.sum(axis=0)
    met = np.array([each.done.synchronised_seconds for each in taken]) + spent[0] - spent
    met = np.maximum(met, 0.0)
    wait = np.minimum(spent.max(axis=0) - spent, met)
    return Meetings(
        samples=(np.stack([each.done.share.sizes for each in taken], axis=1) * passes).astype(np.float64),
        measured=(np.stack([each.reports.samples for each in taken], axis=1) * passes).astype(np.float64),
        own=own,
        wait=wait,
        comm=met - wait,
        seconds=np.array([each.ended - each.done.entered for each in taken]),
    )


def _say_lines(sums: _Sums, scheme: str, say: Callable[[str], None], process: int) -> None:
    if os.getpid() == process:  # A fork, such as a data worker, inherits this, but its end is not the run's.
        account = sums.finish()
        for line in [*summary_lines(account, scheme), *bars(account, scheme)]:
            say(line)


def bars(account: Account, scheme: str) -> list[str]:
    """The average iteration of each worker as a bar, if they are few; colours are for a terminal."""
    encoding = str(getattr(sys.stderr, "encoding", None)).lower()
    if not 2 <= account.workers <= _MOST_BARS or not account.iterations or not encoding.startswith("utf"):
        return []
    # At the end only, since rich takes a while to import.
    from evenstep.report.summary import summary_of_account
    from evenstep.report.terminal import iteration_bars, lines_of

    shown = iteration_bars([summary_of_account(account, scheme)], width=_BAR)
    return lines_of(shown, colours=sys.stderr.isatty())
