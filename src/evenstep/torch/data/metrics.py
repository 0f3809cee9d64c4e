"""Metrics over all workers: their shares are uneven, so a mean of means would be wrong."""

import math
import warnings
import zlib
from typing import TypeVar, cast

import torch

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.torch.processes.workers import Workers, of_all

Value = TypeVar("Value", bound=float | torch.Tensor)


def mean_over_workers(workers: Workers, value: Value, count: float) -> Value:
    """The mean of all workers' values, weighted by counts; summed in a fixed order, so all get the same bits.

    Raises:
        ConfigError: The value or the count is not a number, a count is negative or not finite, or all counts are 0.
    """
    try:
        count = float(count)
        mine = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value), dtype=torch.float64)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"mean_over_workers takes a number or a tensor, and its count, not {shown(value)} and {shown(count)}"
        ) from None
    if not (math.isfinite(count) and count >= 0):
        raise ConfigError(f"a mean over workers is weighted by counts >= 0, not {count}")
    if not workers.gathers:
        warnings.warn(
            "workers of parameter servers do not wait for each other, so mean_over_workers gives each its own value:"
            " after the loop they have the same weights, and one of them can measure for all",
            stacklevel=3,
        )
        return value
    # A value of count 0 may be a NaN.
    values = mine.double().cpu().flatten() if count else torch.zeros(mine.numel(), dtype=torch.float64)
    rows = of_all(workers, torch.cat([values, torch.tensor([count], dtype=torch.float64)]))
    counts = rows[:, -1:]
    if not counts.any():
        raise ConfigError("there is no mean over workers that counted nothing: leave out such a metric on all of them")
    mean = (rows[:, :-1] * (counts / counts.sum())).sum(dim=0).view(mine.shape)
    if not isinstance(value, torch.Tensor):
        return cast("Value", float(mean))
    return cast("Value", mean.to(mine.device, mine.dtype if mine.is_floating_point() else torch.get_default_dtype()))


def rows_of_all(workers: Workers, values: torch.Tensor) -> list[torch.Tensor]:
    """The rows of each worker's tensor, in worker order; workers may have different numbers. A scalar is one row.

    Raises:
        ConfigError: Workers do not wait for each other, or the rows differ in shape or dtype.
    """
    if not workers.gathers:
        raise ConfigError(
            "workers of parameter servers do not wait for each other: gather after the run, on one of them"
        )
    own = values.detach().cpu()
    own = own if own.dim() else own[None]
    form = f"{list(own.shape[1:])} of {own.dtype}"
    told = of_all(workers, torch.tensor([len(own), zlib.crc32(form.encode())]))
    if (told[:, 1] != told[0, 1]).any():  # Gloo would abort the process.
        raise ConfigError(f"workers gather rows of other shapes or dtypes, here {form}: pad them to one shape before")
    lengths = told[:, 0].tolist()
    padded = own.new_zeros((max(lengths), *own.shape[1:]))
    padded[: len(own)] = own
    parts = zip(of_all(workers, padded), lengths, strict=True)
    return [rows[:length].to(values.device) for rows, length in parts]
