"""How much a worker's gradient counts."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from evenstep.core.samples.lookahead import Share


def by_samples(share: Share) -> float:
    """x_i / X: the sum over all workers is then the gradient of the union batch (LB-BSP, arXiv 1806.02508)."""
    return share.samples / int(share.sizes.sum())


def alike(share: Share) -> float:
    """1 / n over the n workers that have samples, whatever their sizes: DBS as of the time of its paper."""
    return 1 / int((share.sizes > 0).sum()) if share.samples else 0.0


WEIGHTINGS: Final[Mapping[str, Callable[[Share], float]]] = MappingProxyType({"samples": by_samples, "mean": alike})
"""The weightings by the names that schemes use."""
