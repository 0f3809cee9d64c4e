"""The work of each node in a federated round; every round may have other nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal, NamedTuple, TypeAlias, final, get_args

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.base import Load
from evenstep.core.load.elasticity import Elasticity
from evenstep.core.load.experts import Experts, ExpertsPolicy
from evenstep.core.load.shares import shares_of
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED, IntArray, Problem, Reports

Mode: TypeAlias = Literal["batch", "steps", "batch-and-lr"]
MODES: Final[tuple[str, ...]] = get_args(Mode)
"""Names of what follows a node's speed: batch size, number of local steps, or batch size together with rate."""


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
    """LB-BSP for federated learning (TCC'21): batch sizes follow nodes' speeds; steps and rate are equal for all.

    One `ExpertsPolicy` keeps the paces of all nodes, also over rounds without them. A node that has reported no time
    counts as the median of the others.

    Deviations: we do not know the paper's formula for the sizes. The nodes of a round get the sizes that `load` gives
    to workers in an iteration. A round has many steps, so no round is left out as a warm-up. Sizes follow every
    prediction, because another size costs a node nothing. A node whose time does not follow its work, such as one that
    always trains on all of its data, gets at least the mean: with less it would not be faster, and it would seem slower
    in every round. If this holds for all nodes, all are equal.

    Args:
        load: How the work is divided.
        mode: `batch` is the paper's algorithm, which it compares with the others: `steps`, where the number of steps
            follows the speed (adaptive tau), and `batch-and-lr`, where the batch and with it the rate do.
        spread: The largest factor between a node's speed and the median, whatever the node reports.
        flat: A time with an elasticity below this follows the work too little to move work by it ...
        sure: ... if that is certain with this probability.

    Raises:
        ConfigError: The mode is unknown, or the load needs measurements of all workers or has sizes by rank.
    """

    def __init__(
        self, load: Load, mode: Mode = "batch", *, spread: int = 64, flat: float = 0.25, sure: float = 0.98
    ) -> None:
        if mode not in MODES:
            raise ConfigError(
                f"the work of a node cannot follow its speed in {shown(mode)}: use one of {', '.join(MODES)}"
            )
        if load.given_sizes is not None or (load.follows_speed and not isinstance(load, Experts)):
            raise ConfigError(
                "nodes come and go between rounds, so their sizes need a load that predicts the speed of each: use"
                " lb-bsp, or bsp for equal sizes"
            )
        self.mode = mode
        self._spread, self._flat, self._sure = spread, flat, sure
        self._load = replace(load, warmup=0, change_cost=0.0) if isinstance(load, Experts) else load
        self._nodes: dict[int, int] = {}  # Each node's index in the policy.
        self._policy: ExpertsPolicy | None = None
        self._elasticity = Elasticity(0)
        self._mean = 1
        self.flat: set[int] = set()
        """The nodes whose time does not follow their work, in the last plan. Read-only."""
        self._heard: dict[int, tuple[int, int]] = {}  # Samples, or steps, and microseconds since the last plan.

    def observe(self, node: int, work: Work, seconds: float) -> None:
        """Record a round of this node: its work, and its seconds of compute, finite and >= 0."""
        varied, alike = self._parts(work)
        self._heard[node] = varied, min(round(seconds / alike * 1e6), 10**15)  # So that sums fit 64 bits.

    def plan(self, nodes: Sequence[int], batch_size: int, steps: int = 1) -> dict[int, Work]:
        """Plan the work of each node of the next round.

        `batch_size` and `steps` are means over the nodes for what follows the speed, and equal for all otherwise.

        Raises:
            ConfigError: No such sizes satisfy the load's limits.
        """
        if self.mode == "steps":
            return {node: Work(batch_size, each) for node, each in self._shares(nodes, steps).items()}
        sizes = self._shares(nodes, batch_size)
        if self.mode == "batch":
            return {node: Work(size, steps) for node, size in sizes.items()}
        return {node: Work(size, steps, size / batch_size) for node, size in sizes.items()}

    def seconds(self, plan: Mapping[int, Work]) -> dict[int, float]:
        """The seconds of compute of each node in the plan at its last pace; empty before any time is known."""
        self._learn()
        if self._policy is None:
            return {}
        paces, usual = self._policy.paces, float(np.median(self._policy.paces))
        predicted = {}
        for node, work in plan.items():
            varied, alike = self._parts(work)
            pace = float(paces[self._nodes[node]]) if node in self._nodes else usual
            predicted[node] = float(np.clip(pace, usual / self._spread, usual * self._spread)) * varied * alike * 1e-6
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
        self._learn()
        self._mean = mean
        least = 1 if load.minimum is None else load.minimum
        problem = Problem(
            global_batch_size=mean * count,
            minimum=np.array([mean if node in self.flat else least for node in nodes], dtype=np.int64),
            maximum=np.full(count, UNLIMITED if load.maximum is None else load.maximum, dtype=np.int64),
            multiple=load.multiple,
        )
        return dict(zip(nodes, shares_of(problem, self._weights(nodes)).tolist(), strict=True))

    def _learn(self) -> None:
        """Take in the reports since the last plan; new nodes join the policy."""
        if not self._heard or not isinstance(self._load, Experts):
            return
        new = [node for node in self._heard if node not in self._nodes]
        if new:
            before, known = self._policy, len(self._nodes)
            self._nodes |= {node: known + index for index, node in enumerate(new)}
            self._policy = self._load.policy(len(self._nodes))
            self._elasticity.add(len(new))
            if before is not None:
                self._policy.recall([(before, index) for index in range(known)] + [None] * len(new))
        assert self._policy is not None
        table = np.zeros((len(self._nodes), Reports.columns()), dtype=np.int64)
        for node, (varied, microseconds) in self._heard.items():
            index, heard = self._nodes[node], (max(microseconds, 1), max(varied, 1) / self._mean)
            table[index, :2] = varied, heard[0]
            twice = [heard, heard] if node in new else [heard]  # The policy leaves out the first, as a warm-up.
            self._elasticity.observe(index, *np.array(twice, dtype=np.float64).T)
        most = self._elasticity.quantiles(np.array([self._sure]))[0]
        self.flat = {node for node, index in self._nodes.items() if most[index] < self._flat}
        self._heard.clear()
        self._policy.observe(Reports.from_table(table))

    def _weights(self, nodes: Sequence[int]) -> IntArray:
        """Relative speeds; an unknown one counts as the median."""
        speeds = None if self._policy is None else self._policy.proposal
        if speeds is None:
            return np.ones(len(nodes), dtype=np.int64)
        usual = max(int(np.median(speeds)), 1)
        weights = [int(speeds[self._nodes[node]]) if node in self._nodes else usual for node in nodes]
        return np.clip(np.array(weights, dtype=np.int64), max(usual // self._spread, 1), usual * self._spread)
