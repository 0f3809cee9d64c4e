"""How long a run lasted, and whether that is long enough to judge it."""

from typing import Final

MIN_ITERATIONS: Final = 20
"""A run of fewer iterations has no verdict: `lb-bsp` has just begun with its own sizes after the five equal ones."""
SHORTEST_SECONDS: Final = 1.0
"""Nor has a shorter run: caches, connections and the clock of the processor take about as long to settle."""


def long_enough(iterations: int, seconds: float) -> bool:
    """Whether a run of so many iterations, which took so many seconds, can be judged."""
    return iterations >= MIN_ITERATIONS and seconds >= SHORTEST_SECONDS


def too_short(iterations: int, seconds: float) -> str:
    """The sentence that stands for the verdict on a run that is not long enough."""
    return f"Too short for a verdict: {counted(iterations)} in {duration(seconds)}."


def counted(iterations: int) -> str:
    """A number of iterations as a person reads it: `1 iteration`, `1,200 iterations`."""
    return f"{iterations:,} iteration" + ("" if iterations == 1 else "s")


def duration(seconds: float) -> str:
    """Seconds as a person reads them: `44.1 s`, `12 min`, `3.5 h`."""
    if seconds < 600:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
