"""A load policy that follows a script, for tests of everything that must not depend on the sizes."""

from dataclasses import dataclass
from typing import cast, final

import numpy as np

from evenstep.core.load.base import LoadPolicy
from evenstep.core.load.estimate import Estimator
from evenstep.core.load.predict import PREDICTORS
from evenstep.core.values import Allocation, IntArray, Problem, Reports, State


@final
class ScriptedPolicy:
    """Other sizes after every iteration: any that satisfy the problem, drawn from (seed, number of the decision)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._decisions = 0

    def observe(self, reports: Reports) -> None:
        """Count the iteration."""
        self._decisions += 1

    def allocate(self, problem: Problem) -> Allocation:
        """The sizes of this decision; asked twice, the same."""
        generator = np.random.Generator(np.random.Philox(key=self._seed, counter=self._decisions))
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
        return Allocation(sizes=sizes)

    def state_dict(self) -> State:
        """How far the script is."""
        return {"decisions": self._decisions}

    def load_state_dict(self, state: State) -> None:
        """Go on from there."""
        self._decisions = cast("int", state["decisions"])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted:
    """The part of a scheme that makes `ScriptedPolicy`."""

    seed: int = 0
    minimum: int | None = None
    maximum: int | None = None
    multiple: int = 1

    def policy(self, workers: int) -> LoadPolicy:
        """A new policy at the beginning of the script."""
        return ScriptedPolicy(self.seed)

    def estimator(self) -> Estimator:
        """A new estimator, whose speeds are only shown."""
        return Estimator(PREDICTORS["last"])
