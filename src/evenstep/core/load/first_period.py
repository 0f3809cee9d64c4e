"""Divides the first period of a run by speed while it lasts, from the times of its first steps."""

from dataclasses import replace
from typing import Final

import numpy as np

from evenstep.core.load.base import LoadPolicy
from evenstep.core.values import Basis, IntArray, Problem, Reports

FIRST_STEPS: Final = 2
"""The steps of a first period after which workers compare the time of the last one; those before are the warm-up."""


def compares_first_steps(problem: Problem, sizes: IntArray, batch_size: int, *, basis: Basis, met: bool) -> bool:
    """True if workers compare the times of their first steps in a period of these sizes, on all workers alike.

    They do where no speed is known, and where every worker has steps left to divide after the first ones.

    Args:
        problem: The conditions on the sizes.
        sizes: The sizes of the period, int64 of shape [workers], in samples like the others.
        batch_size: The samples of a step.
        basis: What the sizes are based on; `evenstep plan`, for one, begins with sizes by speed.
        met: Whether workers have met at the end of a period before.
    """
    if basis != "start" or met or len(sizes) < 2:
        return False
    return sum(sizes.tolist()) == problem.global_batch_size and int(sizes.min()) > FIRST_STEPS * batch_size


def first_period_sizes(
    policy: LoadPolicy, problem: Problem, sizes: IntArray, taken: IntArray, samples: IntArray, microseconds: IntArray
) -> IntArray:
    """The sizes of a period that began with these: what each worker has taken, and its part of the rest by its speed.

    All workers wait for each other when they compare their times, so the rest is divided as a period of its own is:
    x_i = taken_i + r_i, where the policy divides the rest r, and the sum stays.

    Args:
        policy: A new policy of the run's load. That of the run learns from the whole period.
        problem: The conditions on the sizes.
        sizes: The sizes until now, int64 of shape [workers], in samples like the others.
        taken: The samples that each worker has begun or fetched.
        samples: Those of the step that was timed; 0 for a worker that did not compute it.
        microseconds: The time that this step took.
    """
    rest = problem.global_batch_size - int(taken.sum())
    if (taken >= sizes).any() or rest % problem.multiple:
        return sizes
    unknown = np.zeros_like(samples)
    policy.allocate(problem)  # The equal sizes that the run began with, which a policy may keep for an epoch.
    policy.observe(Reports(samples, microseconds, unknown, problem.maximum))
    left = replace(
        problem,
        global_batch_size=rest,
        minimum=np.maximum(problem.minimum - taken, problem.multiple),
        maximum=problem.maximum - taken,
    )
    allocation = policy.allocate(left)
    return sizes if allocation.basis == "start" else taken + allocation.sizes
