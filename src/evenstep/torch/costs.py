"""The costs of samples, as a script gives them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from evenstep.core.errors import ConfigError
from evenstep.core.samples import Costs
from evenstep.core.shown import shown
from evenstep.protocol.messages import COST_BYTES
from evenstep.protocol.run_spec import MAX_BYTES
from evenstep.schemes import Scheme
from evenstep.schemes.costs import require_costs
from evenstep.torch.data.order import EpochOrder
from evenstep.torch.data.sampling import Positions
from evenstep.torch.request import RunRequest

_MAX_SERVED: Final = MAX_BYTES // COST_BYTES
"""The most positions whose costs fit into a message."""

Numbers: TypeAlias = Sequence[float] | npt.NDArray[Any] | torch.Tensor | Callable[[int], float] | str
"""One number per dataset index, a function of an index, or the name of a field of the samples."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class Padded:
    """The lengths of samples whose batches are padded to the longest: n samples cost n * longest ** power.

    Args:
        lengths: One number above 0 per index of the dataset, a function of an index, or the name of a field.
        power: 1, or 2 if the time grows with the square of the length, as for attention over long texts.
    """

    lengths: Numbers
    power: int = 1


Cost: TypeAlias = Numbers | Padded
"""The cost of each sample of a dataset in any unit, or lengths."""


def costs_of(request: RunRequest, scheme: Scheme, order: EpochOrder) -> Costs | None:
    """The costs of the samples of the request's loader; None if none were given.

    Raises:
        ConfigError: The costs do not fit this dataset, or the scheme cannot divide samples by cost.
    """
    if request.cost is None:
        return None
    require_costs(scheme)
    if scheme.served is not None and isinstance(request.cost, Padded):
        raise ConfigError(
            "Padded gives workers samples of like length, and on parameter servers samples are claimed in the order of"
            " the epoch, which saves no padding: use lb-bsp, or give the lengths themselves as cost"
        )
    if order.endless:
        raise ConfigError("shares without a length never end, and cost has one number for each: give shares a length")
    if scheme.served is not None and order.length > _MAX_SERVED:
        raise ConfigError(
            f"on parameter servers cost is possible for epochs of at most {_MAX_SERVED} samples, not {order.length}:"
            " leave out cost, or use lb-bsp"
        )
    length, padded = order.dataset_length, isinstance(request.cost, Padded)
    asked = request.cost if isinstance(request.cost, Padded) else Padded(cast("Numbers", request.cost))
    if asked.power not in (1, 2):
        raise ConfigError(f"the power of padded lengths is 1 or 2, not {shown(asked.power)}")
    own = request.loader
    if padded and own.collate_fn is default_collate and not isinstance(own.dataset, Positions):
        raise ConfigError(
            "Padded is for batches that are padded to their longest sample, which the loader's default collate function"
            " does not do: give the loader a collate_fn that pads, or give the numbers themselves as cost"
        )
    numbers = asked.lengths
    if isinstance(numbers, str):
        numbers = _field(own.dataset, numbers)
    given = _called(numbers, length) if callable(numbers) else _array(numbers)
    return Costs.of(given, length, padded=padded, power=asked.power)


def _field(dataset: Any, name: str) -> Any:
    """The column of that name if the dataset has columns, as Hugging Face datasets do; else a function of an index.

    The function loads each whole sample, which may take long.
    """
    if name in (getattr(dataset, "column_names", None) or ()):
        return np.asarray(dataset[name])
    return lambda index: dataset[index][name]


def _called(cost: Callable[[int], object], length: int) -> npt.NDArray[np.float64]:
    costs = np.empty(length)
    for index in range(length):
        try:
            costs[index] = cost(index)  # type: ignore[call-overload]
        except Exception as error:
            raise ConfigError(
                f"cost failed for sample {index} ({type(error).__name__}: {error}): give a function that returns a"
                " number for each index of the dataset, or the name of a field of its samples that holds a number"
            ) from error
    return costs


def _array(cost: object) -> npt.NDArray[np.float64]:
    try:
        given = cost.detach().cpu().numpy() if isinstance(cost, torch.Tensor) else np.asarray(cost)
    except (TypeError, ValueError, RuntimeError):
        given = np.array(None)
    if given.dtype.kind not in "iuf":
        raise ConfigError(
            "cost must be an array with one number for each sample of the dataset, or a function of an index, not"
            f" {shown(cost)}"
        )
    return given.astype(np.float64)
