"""What is done before an exception ends this process: one hook, for all that is alive by then."""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from os import environ
from types import TracebackType
from typing import Any, Final, TypeVar, final
from weakref import WeakKeyDictionary

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from evenstep.core.errors import EvenstepError
from evenstep.telemetry import Recorder
from evenstep.torch.out_of_memory import named_out_of_memory
from evenstep.torch.processes.liveness import Liveness
from evenstep.worker.balancer import Balancer

_MAX_LETTERS: Final = 300

Owner = TypeVar("Owner")
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]

_alive: WeakKeyDictionary[Any, Callable[[Any, BaseException], BaseException]] = WeakKeyDictionary()


def when_failing(owner: Owner, act: Callable[[Owner, BaseException], BaseException]) -> None:
    """From now on, call `act(owner, error)` before an exception ends this process, as long as the owner is alive.

    What it returns is shown in place of the error. `act` must not refer to the owner.
    """
    install_hook()
    _alive[owner] = act


def install_hook() -> None:
    """From now on, pass exceptions that end this process through here. Calling it twice does no harm."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


@final
class _Hook:
    """Passes an error on to the hook before, after all that is alive has been told.

    Where another library has put its own hook on top, there may be one of these below that, too: it only passes on.
    """

    _telling = False

    def __init__(self, before: ExceptHook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if _Hook._telling:
            self._before(kind, error, traceback)
            return
        _Hook._telling = True
        try:
            shown = error
            for owner, act in list(_alive.items()):
                shown = act(owner, shown)
            report_to_launcher(shown)
            self._before(type(shown), shown, traceback)
        finally:
            _Hook._telling = False


def report_to_launcher(error: BaseException, environment: Mapping[str, str] = environ) -> None:
    """Write an error of evenstep's into the error file that torchrun gives each of its workers, where there is one.

    The launcher then repeats it.
    """
    if "TORCHELASTIC_ERROR_FILE" in environment and isinstance(error, EvenstepError):
        get_error_handler().record_exception(error)


def end_of_run(
    balancer: Balancer,
    error: BaseException,
    *,
    recorder: Recorder,
    device: str,
    advice: str,
    liveness: Liveness | None,
) -> BaseException:
    """Record an error that ends this process before the run is over, name it, and tell the other workers.

    Args:
        balancer: Of the run.
        error: What was raised.
        recorder: Of the run.
        device: Identifies the device of this worker.
        advice: What to do after it ran out of memory.
        liveness: Tells the others, where there are any.
    """
    if balancer.closed:
        return error
    error = named_out_of_memory(balancer, error, recorder, device, advice)
    now = balancer.iteration
    with suppress(OSError):  # A full disk must not hide what has happened.
        recorder.record(
            {
                "event": "error",
                "iteration": -1 if now is None else now.number,
                "at": time.perf_counter(),
                "type": type(error).__name__,
                "text": first_line(error),
            }
        )
    if liveness is not None:
        worker, told = balancer.workers.rank, (type(error).__name__, first_line(error))
        liveness.tell(
            f"worker {worker} ended with {': '.join(filter(None, told))}: look at its output, then start again"
        )
    return error


def first_line(error: BaseException) -> str:
    """The first line of what the error says, or as much of it as fits."""
    line = str(error).strip().partition("\n")[0]
    return line if len(line) <= _MAX_LETTERS else line[: _MAX_LETTERS - 3] + "..."
