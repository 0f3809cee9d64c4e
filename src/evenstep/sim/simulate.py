"""One scenario, simulated."""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.sim.collective import CollectiveRun
from evenstep.sim.log import Log
from evenstep.sim.result import SimulatedRun
from evenstep.sim.scenario import Scenario
from evenstep.sim.served import run_served


def simulate(
    scenario: Scenario, *, log: Log | None = None, progress: Callable[[float], None] | None = None
) -> SimulatedRun:
    """Run the scenario in virtual time; the same scenario gives the same result, and the same log, byte for byte.

    Args:
        scenario: What to run.
        log: Where to write every event; None: only the summary is kept, in memory that does not grow with the run.
        progress: Called from time to time with the part of the run that is done, 0 to 1.

    Raises:
        ConfigError: The run cannot work; one sentence that says what to change.
    """
    report = progress or (lambda _: None)
    try:
        with _uncollected(), np.errstate(over="ignore", invalid="ignore"):
            if scenario.scheme.served is None:
                result = CollectiveRun(scenario, log).finish(report)
            else:
                result = run_served(scenario, log, report)
    except OverflowError:
        result = None
    if result is None or not math.isfinite(result.seconds):
        raise ConfigError("simulated time overflows a float: look for a mistake in the times, factors and bandwidths")
    return result


@contextmanager
def _uncollected() -> Iterator[None]:
    """Switch the collector of cycles off: a run makes no cycles, and looking for them takes a tenth of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
