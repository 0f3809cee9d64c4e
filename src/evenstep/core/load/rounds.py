"""Batch sizes of federated rounds: of the nodes that take part in one, which may be others in every round."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.base import Load
from evenstep.core.load.checked import load_policy
from evenstep.core.load.predicted import Predicted
from evenstep.core.values import UNLIMITED, IntArray, Problem, Reports

if TYPE_CHECKING:
    from evenstep.core.load.estimate import Estimator

_SPREAD: Final = 64
"""No node counts as more times as fast or as slow as the median, whatever it reports."""

_RATE, _FIXED, _ERROR, _FLAT = range(4)


@final
class RoundSizes:
    """LB-BSP for federated learning (TCC'21): the local batch follows a node's speed, steps and rate are all alike.

    Each node has an estimator of its own, which keeps what it has learned over the rounds in which the node does not
    take part. A node that has reported nothing counts as the median of the others.

    Deviations: the paper's formula for the sizes is not known to us; these are the sizes of the iterations of `load`,
    for the nodes of a round. No iteration is left out as a warm-up, since a round has many steps. As in the paper, and
    other than between iterations, every new solution is applied: another size costs a node nothing.

    Args:
        load: How sizes are decided.

    Raises:
        ConfigError: The load needs measurements of all workers, or sizes by rank.
    """

    def __init__(self, load: Load) -> None:
        if load.given_sizes is not None or (load.follows_speed and (load.by_epoch or not load.uses_estimates)):
            raise ConfigError(
                "nodes come and go between rounds, so their sizes need a load that predicts the speed of each: use"
                " lb-bsp, or bsp for equal sizes"
            )
        self._load = replace(load, warmup=0) if isinstance(load, Predicted) else load
        self._estimators: dict[int, Estimator] = {}

    def observe(self, node: int, samples: int, seconds: float) -> None:
        """Take in a round of this node: local batches of `samples`, and the seconds of compute.

        Raises:
            ValueError: A number is negative or not finite.
        """
        estimator = self._estimators.get(node) or self._load.estimator()
        estimator.observe(samples, seconds)
        self._estimators[node] = estimator

    def sizes(self, nodes: Sequence[int], batch_size: int) -> Mapping[int, int]:
        """The local batch of each of these nodes, which are in the next round; their mean is `batch_size`.

        Raises:
            ConfigError: The limits of the load admit no such sizes.
        """
        count = len(nodes)
        if not count:
            return {}
        load = self._load
        problem = Problem(
            global_batch_size=batch_size * count,
            minimum=np.full(count, 1 if load.minimum is None else load.minimum, dtype=np.int64),
            maximum=np.full(count, UNLIMITED if load.maximum is None else load.maximum, dtype=np.int64),
            multiple=load.multiple,
        )
        policy = load_policy(load, count)
        if load.follows_speed and (estimates := self._estimates(nodes)) is not None:
            nothing = np.zeros(count, dtype=np.int64)
            policy.observe(
                Reports(
                    samples=nothing,
                    compute_microseconds=nothing,
                    nanoseconds_per_sample=estimates[:, _RATE],
                    fixed_nanoseconds=estimates[:, _FIXED],
                    error_ppm=estimates[:, _ERROR],
                    flat_size=estimates[:, _FLAT],
                    largest_size=problem.maximum,
                )
            )
        return dict(zip(nodes, policy.allocate(problem).sizes.tolist(), strict=True))

    def _estimates(self, nodes: Sequence[int]) -> IntArray | None:
        """By node: nanoseconds per sample, fixed nanoseconds, error and flat start; None if no node is known."""
        known = {node: each.estimate() for node, each in self._estimators.items()}
        table = np.array([estimate for estimate in known.values() if estimate.nanoseconds_per_sample], dtype=np.int64)
        if not len(table):
            return None
        usual = np.median(table, axis=0).astype(np.int64)
        usual[_RATE] = max(usual[_RATE], 1)
        rows = [
            known[node] if node in known and known[node].nanoseconds_per_sample else tuple(usual.tolist())
            for node in nodes
        ]
        estimates = np.array(rows, dtype=np.int64)
        rate = int(usual[_RATE])
        estimates[:, _RATE] = np.clip(estimates[:, _RATE], max(rate // _SPREAD, 1), rate * _SPREAD)
        return estimates
