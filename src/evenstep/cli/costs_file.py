"""Reads the value of `--costs`: a distribution, or a file with a number for each sample."""

import io
import json
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from evenstep.cluster.costs import COSTS, DISTRIBUTIONS, CostDistribution
from evenstep.core.errors import ConfigError
from evenstep.core.samples import Costs
from evenstep.telemetry.regular import read_regular

_OPTION: Final = "--costs"


def read_costs(text: str) -> CostDistribution | tuple[float, ...]:
    """Return the distribution of that text, or the numbers in the file of that name.

    A file holds numbers between blanks or line breaks, a list as JSON (`.json`), or an array as NumPy saves it
    (`.npy`).

    Raises:
        ConfigError: It is neither, or a number is not finite and above 0.
    """
    if text.partition(" ")[0] in DISTRIBUTIONS:
        return COSTS.read(_OPTION, text)
    path = Path(text)
    try:
        content = read_regular(path, most_bytes=256 << 20)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f'{_OPTION}: {text!r} cannot be read ({why}): give a file with a number for each sample, or "lognormal'
            ' SIGMA" or "uniform LEAST MOST"'
        ) from error
    numbers = _numbers(content, path)
    try:
        Costs.of(numbers, len(numbers))
    except ConfigError as error:
        raise ConfigError(f"{_OPTION}: the file {path}: {error}") from None
    return tuple(numbers.tolist())


def _numbers(content: bytes, path: Path) -> npt.NDArray[np.float64]:
    try:
        if path.suffix == ".npy":
            found = np.load(io.BytesIO(content), allow_pickle=False)
        else:
            text = content.decode()
            found = np.array(json.loads(text) if path.suffix == ".json" else [float(word) for word in text.split()])
        numbers: npt.NDArray[np.float64] | None = found.astype(np.float64) if found.dtype.kind in "iuf" else None
    except (ValueError, RecursionError, EOFError):
        numbers = None
    if numbers is None or numbers.ndim != 1 or not numbers.size:
        kind = {".npy": "an array of NumPy", ".json": "a list as JSON"}.get(path.suffix, "numbers between blanks")
        raise ConfigError(f"{_OPTION}: the file {path} does not hold {kind}, a number for each sample")
    return numbers
