"""Prints at the end of a run how it went, with or without a run directory."""

import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, final

import numpy as np

from evenstep.core.values import IntArray, Reports
from evenstep.report.account.account import Account, Meetings
from evenstep.report.account.verdict import summary_lines, verdict_of
from evenstep.worker.iteration import Iteration

_Meeting: TypeAlias = tuple[Iteration, Reports, IntArray]
"""An iteration of worker 0 in which all workers synchronised, as `take` gets it."""


@final
class Summary:
    """Sums up a run on worker 0, and prints a few lines and a picture when it is no longer used or its process ends.

    It keeps totals only, in memory that does not grow with the run.

    Args:
        workers: The number of workers.
        global_batch_size: The samples of one iteration over all workers.
        scheme: The name of the scheme.
        say: Prints a line.
        then: How to start the same run under `lb-bsp`.
    """

    def __init__(
        self, *, workers: int, global_batch_size: int, scheme: str, say: Callable[[str], None], then: str = ""
    ) -> None:
        self._account = Account(workers, global_batch_size, scheme)
        self._waiting: list[_Meeting] = []
        """Iterations that are not added up yet."""
        # A training script has no place where it would close what `prepare` opened.
        self._finish = weakref.finalize(self, _say_lines, self._account, self._waiting, scheme, say, then, os.getpid())

    def take(self, done: Iteration, reports: Reports, outside: IntArray) -> None:
        """Add an iteration in which all workers synchronised.

        Args:
            done: The iteration as worker 0 saw it.
            reports: The reports of all workers.
            outside: `input_seconds` and `script_seconds` of each worker, in microseconds, shape [workers, 2].
        """
        self._waiting.append((done, reports, outside))
        if len(self._waiting) == 64:  # Together, so that each one costs next to nothing.
            _add_up(self._account, self._waiting)

    @property
    def account(self) -> Account:
        """The totals so far."""
        return _add_up(self._account, self._waiting)

    def drop(self) -> None:
        """Print nothing, because the script has failed."""
        self._finish.detach()


def _add_up(account: Account, waiting: list[_Meeting]) -> Account:
    if waiting:
        account.take(_meetings(waiting))
        waiting.clear()
    return account


def _meetings(taken: list[_Meeting]) -> Meetings:
    """Compute what all workers did, from their reports and worker 0's clock.

    All workers leave a synchronisation together, so each has spent as long as worker 0 since the one before.
    """
    done, reports, outside = zip(*taken, strict=True)
    passes = np.array([each.passes for each in done])
    compute = np.stack([each.compute_microseconds for each in reports], axis=1) * passes / 1e6
    inputs, script = np.stack(outside, axis=2).transpose(1, 0, 2) / 1e6
    own = np.stack([compute, inputs, script])
    spent = own.sum(axis=0)
    met = np.array([each.synchronised_seconds for each in done]) + spent[0] - spent
    met = np.maximum(met, 0.0)
    wait = np.minimum(spent.max(axis=0) - spent, met)
    return Meetings(
        samples=(np.stack([each.share.sizes for each in done], axis=1) * passes).astype(np.float64),
        measured=(np.stack([each.samples for each in reports], axis=1) * passes).astype(np.float64),
        own=own,
        wait=wait,
        comm=met - wait,
        seconds=np.array([each.seconds_since_meeting for each in done]),
    )


def _say_lines(
    account: Account, waiting: list[_Meeting], scheme: str, say: Callable[[str], None], then: str, process: int
) -> None:
    # A fork, such as a data worker, inherits this, but its end is not the run's.
    if os.getpid() != process or not _add_up(account, waiting).iterations:
        return
    verdict = verdict_of(account, range(account.workers), scheme)
    lines = summary_lines(account, scheme, verdict)
    if verdict.sizes_may_help:
        from evenstep.advice import accounted_machines, balancing  # At the end only: they import the simulator.

        lines += filter(None, [balancing(verdict, partial(accounted_machines, account), then)])
    for line in [*lines, *bars(account, scheme)]:
        say(line)


def bars(account: Account, scheme: str) -> list[str]:
    """Draw the average iteration of each worker as a bar, if they are few; colours are for a terminal."""
    encoding = str(getattr(sys.stderr, "encoding", None)).lower()
    if not 2 <= account.workers <= 8 or not encoding.startswith("utf"):
        return []
    from evenstep.report.terminal import Bar, drawn, lines_of  # At the end only: rich takes a while to import.

    rows = zip(account.last_sizes, account.own[0] / account.iterations, account.wait / account.iterations, strict=True)
    whole = account.seconds / account.iterations
    shown = [Bar(worker, *row, whole) for worker, row in enumerate(rows)]
    # A line has at most 80 characters.
    return lines_of(drawn({scheme: shown}, width=40), colours=sys.stderr.isatty())
