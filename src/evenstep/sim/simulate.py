"""Simulates one scenario."""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.sim.collective import CollectiveRun
from evenstep.sim.log import Log
from evenstep.sim.result import SimulatedRun
from evenstep.sim.scenario import Scenario
from evenstep.sim.served import ServedRun


def simulate(scenario: Scenario, *, log: Log | None = None) -> SimulatedRun:
    """Run the scenario in virtual time; the same scenario gives the same result, and the same log, byte for byte.

    Args:
        scenario: The scenario to run.
        log: The log for every event; None: only the summary is kept, in memory that does not grow with the run.

    Raises:
        ConfigError: The run cannot work; one sentence that says what to change.
    """
    kind = CollectiveRun if scenario.scheme.served is None else ServedRun
    try:
        with _uncollected(), np.errstate(over="ignore", invalid="ignore"):
            result = kind(scenario, log).finish()
    except OverflowError:
        result = None
    if result is None or not math.isfinite(result.seconds):
        raise ConfigError("simulated time overflows a float: look for a mistake in the times, factors and bandwidths")
    return result


@contextmanager
def _uncollected() -> Iterator[None]:
    """Switch off the cycle collector: a run makes no cycles, and looking for them takes a tenth of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
