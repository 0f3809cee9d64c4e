"""Loads that know the disturbances of a run beforehand: what no scheme that has to observe can be expected to beat."""

from dataclasses import dataclass

import numpy as np

from evenstep.core.load import Load, LoadPolicy
from evenstep.core.load.equal import equal_sizes
from evenstep.core.values import Allocation
from evenstep.schemes import Scheme
from harness import clusters


def oracle(cluster, global_batch_size, iterations, *, late=0):
    """A scheme whose sizes are the exact optimum for the speeds that each iteration turns out to have.

    With `late` it is for the speeds so many iterations before, so that it learns of each change that much later, and
    its first iterations are for the speeds of iteration 0, which it knows. Everything is worked out here, so that
    following it costs the workers nothing.
    """
    factors = clusters.slowness(cluster, iterations)
    known = factors[np.maximum(np.arange(iterations) - late, 0)]
    curves = [worker.device.curve for worker in cluster.workers]
    sizes = clusters.best_of_rising(curves, global_batch_size, known)
    name = f"oracle-late-{late}" if late else "oracle"
    return Scheme(name=name, load=Foreseen(sizes=tuple(tuple(row) for row in sizes.tolist())))


@dataclass(frozen=True, kw_only=True)
class Foreseen(Load):
    """Sizes given for each iteration of a run beforehand."""

    sizes: tuple[tuple[int, ...], ...]

    def policy(self, workers):
        return ForeseenPolicy(self.sizes)


class ForeseenPolicy(LoadPolicy):
    """Counts the iterations that it observes, and gives the next one the sizes foreseen for it."""

    def __init__(self, sizes):
        self._sizes = sizes
        self._iteration = 0

    def observe(self, reports):
        self._iteration += 1

    def allocate(self, problem):
        if self._iteration >= len(self._sizes):
            # After the last iteration the runtime asks once more, for one that does not come.
            return Allocation(sizes=equal_sizes(problem))
        sizes = np.array(self._sizes[self._iteration], dtype=np.int64)
        if sizes.sum() != problem.global_batch_size:
            raise ValueError("an oracle is for full slices: drop the last one of an epoch where it is short")
        return Allocation(sizes=sizes)

    def state_dict(self):
        return {"iteration": self._iteration}

    def load_state_dict(self, state):
        self._iteration = state["iteration"]

    def recall(self, known):
        pass
