"""Reads the value of `--costs`: a distribution, or a file with a number for each sample."""

from pathlib import Path

import numpy as np

from evenstep.cluster.costs import COSTS, DISTRIBUTIONS, CostDistribution
from evenstep.core.errors import ConfigError, naming
from evenstep.core.samples import Costs
from evenstep.telemetry.regular import read_regular


def read_costs(text: str) -> CostDistribution | tuple[float, ...]:
    """Return the distribution of that text, or the numbers in the file of that name.

    A file holds numbers between blanks or line breaks.

    Raises:
        ConfigError: It is neither, or a number is not finite and above 0.
    """
    if text.partition(" ")[0] in DISTRIBUTIONS:
        return COSTS.read("--costs", text)
    try:
        content = read_regular(Path(text), most_bytes=256 << 20)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f'--costs: {text!r} cannot be read ({why}): give a file with a number for each sample, or "lognormal'
            ' SIGMA" or "uniform LEAST MOST"'
        ) from error
    try:
        numbers = [float(word) for word in content.split()]
    except ValueError:
        numbers = []
    if not numbers:
        raise ConfigError(f"--costs: the file {text} does not hold numbers between blanks, one for each sample")
    with naming(f"--costs: the file {text}"):
        Costs.of(np.array(numbers), len(numbers))
    return tuple(numbers)
