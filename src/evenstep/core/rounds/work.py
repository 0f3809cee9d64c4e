"""The work of each node in a federated round; every round may have other nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, final, get_args

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.base import Load
from evenstep.core.load.checked import load_policy
from evenstep.core.load.predicted import Predicted
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED, Estimate, IntArray, Problem, Reports

if TYPE_CHECKING:
    from evenstep.core.load.estimate import Estimator

Mode: TypeAlias = Literal["batch", "steps", "batch-and-lr"]
MODES: Final[tuple[str, ...]] = get_args(Mode)
"""What follows a node's speed: its batch size, its number of local steps, or its batch size together with its rate."""

_SPREAD: Final = 64
"""The largest factor between a node's speed and the median, whatever the node reports."""

_RATE, _FIXED, _ERROR, _FLAT = range(4)


class Work(NamedTuple):
    """A node's work in a round: its batch size, its number of local steps, and a multiplier of the learning rate."""

    batch_size: int
    steps: int = 1
    rate: float = 1.0

    @property
    def samples(self) -> int:
        """The number of samples that the node processes."""
        return self.batch_size * self.steps


@final
class RoundWork:
    """LB-BSP for federated learning (TCC'21): batch sizes follow the nodes' speeds; steps and rate are equal for all.

    Each node has an estimator, which is kept over rounds without the node. A node that has reported no time counts as
    the median of the others.

    Deviations: we do not know the paper's formula for the sizes. These are the sizes that `load` gives to workers in an
    iteration, for the nodes of a round. A round has many steps, so no round is left out as a warm-up. Every new
    solution is applied, because another size costs a node nothing.

    Args:
        load: How the work is shared out.
        mode: `batch` is the paper's algorithm, which it compares with the others: `steps`, where the number of steps
            follows the speed (adaptive tau), and `batch-and-lr`, where the batch does and the rate with it.

    Raises:
        ConfigError: The mode is unknown, or the load needs measurements of all workers or has sizes by rank.
    """

    def __init__(self, load: Load, mode: Mode = "batch") -> None:
        if mode not in MODES:
            raise ConfigError(
                f"the work of a node cannot follow its speed in {shown(mode)}: use one of {', '.join(MODES)}"
            )
        if load.given_sizes is not None or (load.follows_speed and (load.by_epoch or not load.uses_estimates)):
            raise ConfigError(
                "nodes come and go between rounds, so their sizes need a load that predicts the speed of each: use"
                " lb-bsp, or bsp for equal sizes"
            )
        self.mode = mode
        self._load = replace(load, warmup=0) if isinstance(load, Predicted) else load
        self._estimators: dict[int, Estimator] = {}

    def observe(self, node: int, work: Work, seconds: float) -> None:
        """Record a round of this node: its work, and its seconds of compute.

        Raises:
            ValueError: A number is negative or not finite.
        """
        estimator = self._estimators.get(node) or self._load.estimator()
        varied, alike = self._parts(work)
        estimator.observe(varied, seconds / alike)
        estimator.end_block()
        self._estimators[node] = estimator

    def plan(self, nodes: Sequence[int], batch_size: int, steps: int = 1) -> dict[int, Work]:
        """The work of each node of the next round.

        `batch_size` and `steps` are means over the nodes for what follows the speed, and equal for all otherwise.

        Raises:
            ConfigError: The limits of the load admit no such sizes.
        """
        if self.mode == "steps":
            return {node: Work(batch_size, each) for node, each in self._shares(nodes, steps).items()}
        sizes = self._shares(nodes, batch_size)
        if self.mode == "batch":
            return {node: Work(size, steps) for node, size in sizes.items()}
        return {node: Work(size, steps, size / batch_size) for node, size in sizes.items()}

    def seconds(self, plan: Mapping[int, Work]) -> dict[int, float]:
        """The predicted seconds of compute of each node in the plan; empty before any time is known."""
        estimates = self._estimates(list(plan))
        if estimates is None:
            return {}
        predicted = {}
        for (node, work), estimate in zip(plan.items(), estimates.tolist(), strict=True):
            varied, alike = self._parts(work)
            one = estimate[_FIXED] + estimate[_RATE] * max(varied, estimate[_FLAT])
            predicted[node] = one * alike * 1e-9
        return predicted

    def _parts(self, work: Work) -> tuple[int, int]:
        """The part of the work that follows the speed, and the part that is equal for all nodes."""
        return (work.steps, work.batch_size) if self.mode == "steps" else (work.batch_size, work.steps)

    def _shares(self, nodes: Sequence[int], mean: int) -> dict[int, int]:
        count = len(nodes)
        if not count:
            return {}
        load = self._load
        if mean % load.multiple:
            raise ConfigError(
                f"sizes of nodes that come and go cannot be multiples of {load.multiple} with a mean of {mean}: use a"
                " mean that is a multiple too"
            )
        problem = Problem(
            global_batch_size=mean * count,
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
        known: dict[int, Estimate] = {}
        for node, each in self._estimators.items():
            estimate = each.estimate()
            if estimate.nanoseconds_per_sample:
                known[node] = estimate
        if not known:
            return None
        usual = np.median(np.array(list(known.values()), dtype=np.int64), axis=0).astype(np.int64)
        rate = max(int(usual[_RATE]), 1)
        row = (rate, *usual[1:].tolist())
        estimates = np.array([known.get(node, row) for node in nodes], dtype=np.int64)
        estimates[:, _RATE] = np.clip(estimates[:, _RATE], max(rate // _SPREAD, 1), rate * _SPREAD)
        return estimates
