"""A load policy with random batch sizes, to test code whose results must not depend on sizes."""

from dataclasses import dataclass, field
from typing import final

import numpy as np

from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.shares import in_multiples
from evenstep.core.values import Allocation, IntArray, Problem, Reports


@final
@dataclass(slots=True)
class ScriptedPolicy(LoadPolicy):
    """Draws new sizes that satisfy the problem for each iteration, from the seed and the number of the iteration."""

    seed: int
    _decisions: int = field(init=False, default=0)

    def observe(self, reports: Reports) -> None:
        """Count the iteration."""
        self._decisions += 1

    def allocate(self, problem: Problem) -> Allocation:
        """The sizes of this iteration: the same for the same problem."""
        problem = in_multiples(problem)
        generator = np.random.Generator(np.random.Philox(key=self.seed, counter=self._decisions))
        sizes: IntArray = problem.minimum.copy()
        spare = problem.global_batch_size - int(sizes.sum())
        for worker in generator.permutation(problem.workers):
            room = min(spare, int(problem.maximum[worker] - sizes[worker]))
            taken = int(generator.integers(0, room + 1))
            sizes[worker] += taken
            spare -= taken
        for worker in range(problem.workers):
            taken = min(spare, int(problem.maximum[worker] - sizes[worker]))
            sizes[worker] += taken
            spare -= taken
        return Allocation(sizes=sizes * problem.multiple)


@final
@dataclass(frozen=True, kw_only=True)
class Scripted(Load):
    """The load part of a scheme, for `ScriptedPolicy`."""

    seed: int = 0

    def policy(self, workers: int) -> LoadPolicy:
        """A new policy."""
        return ScriptedPolicy(self.seed)
