"""A measured iteration as a checkpoint holds it."""

from dataclasses import asdict
from typing import Any, cast

from evenstep.core.values import Factors, Sample, State


def sample_to_state(sample: Sample) -> State:
    """The sample as plain numbers."""
    return {**sample._asdict(), "factors": asdict(sample.factors)}


def sample_from_state(state: State) -> Sample:
    """The sample that `sample_to_state` was given."""
    numbers = cast("dict[str, Any]", state)
    return Sample(**{**numbers, "factors": Factors(**numbers["factors"])})
