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
from evenstep.sim.served import ServedRun


def simulate(
    scenario: Scenario, *, log: Log | None = None, progress: Callable[[float], None] | None = None
) -> SimulatedRun:
    """Run the scenario in virtual time; the same scenario gives the same result, and the same log, byte for byte.

    Args:
        scenario: What to run.
        log: Where to write every event; None: only the summaries are kept, in memory that does not grow with the run.
        progress: Told now and then which part of the run is done, 0 to 1.

    Raises:
        ConfigError: Something in it cannot work; one sentence that says what to change.
    """
    run = CollectiveRun(scenario, log) if scenario.scheme.served is None else ServedRun(scenario, log)
    try:
        with _uncollected(), np.errstate(over="ignore", invalid="ignore"):
            result = run.finish(progress or (lambda _: None))
    except OverflowError:
        result = None
    if result is None or not math.isfinite(result.seconds):
        raise ConfigError(
            "the run takes longer than numbers can tell: look for a slip in the times, factors and bandwidths"
        )
    return result


@contextmanager
def _uncollected() -> Iterator[None]:
    """A run leaves no cycles behind as it goes on, and looking for them among many workers takes a tenth of it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
