"""Checks the decisions of a user's own load policy before they are used."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.shown import shown
from evenstep.core.values import Allocation, Problem, Reports


def load_policy(load: Load, workers: int) -> LoadPolicy:
    """A new policy of the load. A user's policy is checked at every decision; evenstep's own are checked by tests.

    Raises:
        ConfigError: The load does not make a policy.
    """
    policy: object = load.policy(workers)
    if type(policy).__module__.startswith("evenstep.") and isinstance(policy, LoadPolicy):
        return policy
    name = type(load).__name__
    if not isinstance(policy, LoadPolicy):
        raise ConfigError(f"policy() of the load {name} gave {shown(policy)}: return an evenstep.policies.LoadPolicy")
    return CheckedPolicy(policy)


@final
@dataclass(slots=True)
class CheckedPolicy(LoadPolicy):
    """Wraps another policy and refuses sizes that do not satisfy the problem."""

    _policy: LoadPolicy

    def observe(self, reports: Reports) -> None:
        self._policy.observe(reports)

    def recall(self, known: Sequence[tuple[LoadPolicy, int] | None]) -> None:
        self._policy.recall([each and (cast("CheckedPolicy", each[0])._policy, each[1]) for each in known])

    def allocate(self, problem: Problem) -> Allocation:
        """The other policy's sizes.

        Raises:
            ConfigError: They do not satisfy the problem; the message names the policy.
        """
        allocation: object = self._policy.allocate(problem)
        name = type(self._policy).__name__
        if not isinstance(allocation, Allocation):
            raise ConfigError(f"allocate() of the load policy {name} gave {shown(allocation)}: return an Allocation")
        wrong = wrong_sizes(allocation.sizes, problem)
        if wrong is not None:
            raise ConfigError(f"the load policy {name} gave {wrong}: correct its allocate()")
        return allocation


def wrong_sizes(sizes: object, problem: Problem) -> str | None:
    """The first fault of the sizes, as the rest of a sentence; None if they satisfy the problem."""
    if not isinstance(sizes, np.ndarray) or sizes.dtype != np.int64:
        return f"sizes that are {shown(sizes)} and not an array of int64"
    if sizes.shape != (problem.workers,):
        return f"sizes of shape {sizes.shape} for {problem.workers} workers"
    if int(sizes.sum()) != problem.global_batch_size:
        text, total = shown(sizes.tolist()[:8]), int(sizes.sum())
        return f"the sizes {text}, which sum to {total} and not to the global batch of {problem.global_batch_size}"
    outside = (sizes < problem.minimum) | (sizes > problem.maximum) | (sizes % problem.multiple != 0)
    if not outside.any():
        return None
    worker = int(np.argmax(outside))
    limits = f"{int(problem.minimum[worker])} to {int(problem.maximum[worker])} in multiples of {problem.multiple}"
    return f"worker {worker} the size {int(sizes[worker])}, outside its limits of {limits}"
