"""Costs of samples in virtual time, in the order of each epoch."""

from collections.abc import Sequence
from typing import Final, final

import numpy as np
import numpy.typing as npt

from evenstep.cluster.costs import CostDistribution, draw_costs
from evenstep.cluster.slowness.draw import derive_seed
from evenstep.core.errors import ConfigError
from evenstep.core.samples import Costs, EpochCosts
from evenstep.core.samples.pass_costs import PassCosts
from evenstep.core.shown import shown

_MAX_DRAWN: Final = 2**16
"""The most samples with separate draws from a distribution; in a longer epoch, several samples share each cost."""

CostsOfSamples = CostDistribution | Sequence[float]
"""Costs of samples: a distribution, or the cost of each sample of a dataset."""


@final
class SampleCosts:
    """The costs of a run's samples, in an order drawn for each epoch.

    Args:
        given: The costs, in any unit.
        length: Samples in an epoch. If the dataset has another size, each epoch has some of it, or all several times.
        seed: Draws costs and orders.

    Raises:
        ConfigError: A cost is not finite and positive, or there are none.
    """

    def __init__(self, given: CostsOfSamples, length: int, seed: int) -> None:
        if not isinstance(given, Sequence | np.ndarray):
            given = draw_costs(given, min(length, _MAX_DRAWN), derive_seed(seed, "costs"))
        self.costs: Final = Costs.of(_array(given), len(given))
        self._length = length
        self._seed = seed
        self._epoch: tuple[int, EpochCosts] | None = None
        self._pass: tuple[int, PassCosts] | None = None

    def of_epoch(self, number: int) -> EpochCosts:
        """The costs of this epoch's samples, by position."""
        if self._epoch is None or self._epoch[0] != number:
            generator = np.random.default_rng(derive_seed(self._seed, f"order of epoch {number}"))
            samples = len(self.costs.units)
            orders = [generator.permutation(samples) for _ in range(-(-self._length // samples))]
            self._epoch = number, EpochCosts(self.costs, np.concatenate(orders)[: self._length])
        return self._epoch[1]

    def of_pass(self, number: int) -> PassCosts:
        """The costs of this pass, for a coordinator."""
        if self._pass is None or self._pass[0] != number:
            self._pass = number, PassCosts.of(self.of_epoch(number).of(np.arange(self._length)), self.costs.mean)
        return self._pass[1]

    def samples(self, units: int) -> float:
        """This cost in average samples."""
        return units * len(self.costs.units) / self.costs.whole


def _array(given: Sequence[float]) -> npt.NDArray[np.float64]:
    try:
        numbers = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        numbers = None
    if numbers is None or not numbers.size:
        raise ConfigError(f"costs must be a distribution, or one number for each sample, not {shown(given)}")
    return numbers
