"""Describes how processes ended, and finds which of several failures was the cause."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of a worker's process.

    Attributes:
        exit_code: Negative for the number of a signal.
        message: First line of the worker's error file; empty if there is none.
        at_seconds: Time of the end, by the clock of the worker's keeper.
        restarts: Number of times that the worker was restarted before.
        again: Whether its keeper restarts it now.
        asked_to_end: Whether the launcher, or a signal to it, asked the worker to end.
        rank: Which of its processes ended first, if it is a replica of several.
    """

    worker: int
    exit_code: int
    message: str = ""
    at_seconds: float = 0.0
    restarts: int = 0
    again: bool = False
    asked_to_end: bool = False
    rank: int | None = None

    @property
    def name(self) -> str:
        """The process that ended."""
        return f"worker {self.worker}" if self.rank is None else f"replica {self.worker}, rank {self.rank}"

    @property
    def failed(self) -> bool:
        """True if it ended by a signal or with an exit code other than 0."""
        return self.exit_code != 0

    @property
    def missed_another(self) -> bool:
        """True if it ended only because another worker had."""
        return "WorkerLostError" in self.message

    @property
    def how(self) -> str:
        """The rest of a sentence that begins with the worker."""
        return how_it_ended(self.exit_code, _reason(self.message))

    def __str__(self) -> str:
        reason = _reason(self.message) or ("" if self.exit_code < 0 else "its own output above tells why")
        hint = ", which is what a system out of memory does" if self.exit_code == -signal.SIGKILL else ""
        return f"{self.name} {how_it_ended(self.exit_code, reason)}{hint}"


def failures_in(ends: Iterable[Ending]) -> list[Ending]:
    """The workers that failed, the cause first. Workers stopped as a result, or that only missed another, come last."""

    def order(end: Ending) -> tuple[bool, bool, bool, float]:
        # A worker that loses another may end before it, with an exit or an abort.
        killed = end.exit_code < 0 and end.exit_code != -signal.SIGABRT
        return end.asked_to_end, end.missed_another, not killed, end.at_seconds

    return sorted((end for end in ends if end.failed), key=order)


def how_it_ended(exit_code: int, reason: str = "") -> str:
    """The rest of a sentence that begins with the process.

    >>> how_it_ended(-9)
    'was killed by SIGKILL'
    >>> how_it_ended(1, "no data")
    'ended with exit code 1: no data'
    """
    how = f"was killed by {signal_name(-exit_code)}" if exit_code < 0 else f"ended with exit code {exit_code}"
    return f"{how}: {reason}" if reason else how


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal N` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _reason(message: str) -> str:
    """A message without the type of the error, unless it is one of Python's: those say little without their type."""
    kind, _, text = message.partition(": ")
    return (text if kind.endswith("Error") else message) or message
