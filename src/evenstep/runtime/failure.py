"""An exception that ends a worker's script, written down before the process ends."""

import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final

from evenstep.runtime.balancer import Balancer
from evenstep.telemetry import Recorder

_MOST_LETTERS: Final = 300


def record_failure(balancer: Balancer, recorder: Recorder, clock: Callable[[], float]) -> None:
    """From now on, record an exception that ends this process before the run is over."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if not balancer.closed:
            now = balancer.iteration
            with suppress(OSError):  # A full disk must not hide what has happened.
                recorder.record(
                    {
                        "event": "error",
                        "iteration": -1 if now is None else now.number,
                        "at": clock(),
                        "type": kind.__name__,
                        "text": first_line(error),
                    }
                )
        before(kind, error, traceback)

    sys.excepthook = hook


def first_line(error: BaseException) -> str:
    """The first line of what the error says, or as much of it as fits."""
    line = str(error).strip().partition("\n")[0]
    return line if len(line) <= _MOST_LETTERS else line[: _MOST_LETTERS - 3] + "..."
