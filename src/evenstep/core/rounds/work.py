"""The work of federated rounds: of the nodes that take part in one, which may be others in every round."""

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
"""What follows a node's speed: its batch size, its number of local steps, or its batch size and its rate with it."""

_SPREAD: Final = 64
"""No node counts as more times as fast or as slow as the median, whatever it reports."""

_RATE, _FIXED, _ERROR, _FLAT = range(4)


class Work(NamedTuple):
    """What a node does in a round: so many local steps on batches of this size, at this multiple of the rate."""

    batch_size: int
    steps: int = 1
    rate: float = 1.0

    @property
    def samples(self) -> int:
        """How many samples the node processes."""
        return self.batch_size * self.steps


@final
class RoundWork:
    """LB-BSP for federated learning (TCC'21): the local batch follows a node's speed, steps and rate are all alike.

    Each node has an estimator of its own, which keeps what it has learned over the rounds in which the node does not
    take part. A node that has reported nothing counts as the median of the others.

    Deviations: the paper's formula for the sizes is not known to us; these are the sizes of the iterations of `load`,
    for the nodes of a round. No iteration is left out as a warm-up, since a round has many steps. As in the paper, and
    other than between iterations, every new solution is applied: another size costs a node nothing.

    Args:
        load: How the work is shared out.
        mode: `batch` is the paper's algorithm. `steps` and `batch-and-lr` are what it compares with: the number of
            steps follows the speed (adaptive tau), or the batch does and the rate in proportion to it.

    Raises:
        ConfigError: There is no such mode, or the load needs measurements of all workers, or sizes by rank.
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
        """Take in a round of this node: what it did, and its seconds of compute.

        Raises:
            ValueError: A number is negative or not finite.
        """
        estimator = self._estimators.get(node) or self._load.estimator()
        varied, alike = self._parts(work)
        estimator.observe(varied, seconds / alike)
        self._estimators[node] = estimator

    def plan(self, nodes: Sequence[int], batch_size: int, steps: int = 1) -> dict[int, Work]:
        """The work of each of these nodes, which are in the next round.

        What follows the speed has the given mean over the nodes; the rest is the given one for all of them.

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
        """The predicted seconds of compute of each of these nodes; empty before anything is known."""
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
        """What follows the speed, and what is alike for all nodes, by which times are divided."""
        return (work.steps, work.batch_size) if self.mode == "steps" else (work.batch_size, work.steps)

    def _shares(self, nodes: Sequence[int], mean: int) -> dict[int, int]:
        count = len(nodes)
        if not count:
            return {}
        load = self._load
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
