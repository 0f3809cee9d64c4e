"""Simulates one scenario."""

import gc
import math

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
    collects = gc.isenabled()
    gc.disable()  # A run makes no cycles, and looking for them takes a tenth of its time.
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            result = kind(scenario, log).finish()
    except OverflowError:
        result = None
    finally:
        if collects:
            gc.enable()
    if result is None or not math.isfinite(result.seconds):
        raise ConfigError("simulated time overflows a float: look for a mistake in the times, factors and bandwidths")
    return result
