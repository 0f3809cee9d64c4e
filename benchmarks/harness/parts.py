"""Which parts of evenstep an iteration's own time goes to, by timers around their methods."""

import time
from collections import defaultdict
from contextlib import contextmanager
from functools import wraps

from evenstep.core.samples import Lookahead
from evenstep.telemetry import JsonlRecorder
from evenstep.torch.data.batch_maker import BatchMaker
from evenstep.torch.engines.collective import CollectiveEngine
from evenstep.torch.engines.engine import Engine
from evenstep.torch.engines.reports import ReportExchange
from evenstep.torch.engines.traces import Traces
from evenstep.torch.engines.weighting import SummedModel
from evenstep.worker.iteration import Iteration
from evenstep.worker.meter import Rows
from evenstep.worker.summary import Summary
from evenstep.worker.tracker import Tracker

PARTS = {
    "hook": [(CollectiveEngine, "communicate"), (CollectiveEngine, "_reduce_on_host")],
    "weighting": [(SummedModel, "apply")],
    "exchange": [(ReportExchange, name) for name in ("start", "wait")],
    "the row": [(Rows, "row")],
    "deciding sizes": [(Tracker, "learn"), (Lookahead, "replan")],
    "loader": [
        (BatchMaker, "batch"), (Traces, "__init__"), (Engine, "hand_out"),
        (CollectiveEngine, "enter_loader"), (Lookahead, "share"), (Lookahead, "advance"),
    ],
    "checks": [
        (Engine, "forward_begins"), (CollectiveEngine, "reduction_begins"), (Engine, "forward_ends"),
        (Engine, "_backward_begins"), (CollectiveEngine, "before_step"), (Rows, "check"),
    ],
    "event log": [(Iteration, "event"), (JsonlRecorder, "record"), (Summary, "take")],
}  # fmt: skip
"""Methods by part. A method that is called within another counts for its own part alone."""


class Timers:
    """The CPU seconds of the calling thread that each part took."""

    def __init__(self):
        self.seconds = defaultdict(float)
        self._open = []
        self._since = 0.0

    def enter(self, part):
        self._charge()
        self._open.append(part)

    def leave(self):
        self._charge()
        self._open.pop()

    def _charge(self):
        now = time.thread_time()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


@contextmanager
def timed():
    """Timers that run while the context is open."""
    timers, replaced = Timers(), []
    try:
        for part, methods in PARTS.items():
            for owner, name in methods:
                replaced.append((owner, name, owner.__dict__[name]))
                setattr(owner, name, _timed(timers, part, owner.__dict__[name]))
        yield timers
    finally:
        for owner, name, method in replaced:
            setattr(owner, name, method)


def _timed(timers, part, method):
    @wraps(method)
    def call(*args, **kwargs):
        timers.enter(part)
        try:
            return method(*args, **kwargs)
        finally:
            timers.leave()

    return call
