"""A measured iteration as a checkpoint holds it."""

from typing import cast

from evenstep.core.values import Factors, Sample, State


def sample_to_state(sample: Sample) -> State:
    """The sample as plain numbers."""
    return {
        "samples": sample.samples,
        "compute_seconds": sample.compute_seconds,
        "cpu_availability": sample.factors.cpu_availability,
        "memory_availability": sample.factors.memory_availability,
    }


def sample_from_state(state: State) -> Sample:
    """The sample that `sample_to_state` was given."""
    numbers = cast("dict[str, float]", state)
    return Sample(
        samples=numbers["samples"],
        compute_seconds=numbers["compute_seconds"],
        factors=Factors(
            cpu_availability=numbers["cpu_availability"], memory_availability=numbers["memory_availability"]
        ),
    )
