"""Iterations behind a barrier, as all workers together saw them."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, TypeAlias, final

import numpy as np
import numpy.typing as npt

from evenstep.core.account.cause import Cause
from evenstep.core.values import Basis

FloatArray: TypeAlias = npt.NDArray[np.float64]

OWN: Final = (Cause.COMPUTE, Cause.INPUT, Cause.SCRIPT)
"""What a worker does for itself between two meetings, in the order of `Meetings.own`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Meetings:
    """Consecutive iterations in which all workers met; seconds, and shape [workers, iterations] where not said.

    `own` has the shape [parts, workers, iterations]: what each worker did for itself since the meeting before, in the
    order of `OWN`. All leave a meeting together, so the others wait for the one with the most of it. `seconds`, shape
    [iterations], is the whole iteration, and `bases` says why each has its sizes.
    """

    samples: FloatArray
    own: FloatArray
    wait: FloatArray
    comm: FloatArray
    seconds: FloatArray
    bases: tuple[Basis, ...]

    def blame(self) -> FloatArray:
        """Seconds that all waited for each worker, by cause; shape [workers, parts].

        The cause is the part in which the latest worker exceeds the median most.
        """
        numbers = np.arange(len(self.seconds))
        latest = self.own.sum(axis=0).argmax(axis=0)
        excess = self.own[:, latest, numbers] - np.median(self.own, axis=1)
        blame = np.zeros((self.own.shape[1], len(OWN)))
        np.add.at(blame, (latest, excess.argmax(axis=0)), self.wait.sum(axis=0))
        return blame

    def without_input(self) -> FloatArray:
        """What each iteration would have taken had no worker waited for its input; shape [iterations]."""
        compute, inputs, script = self.own
        late = (compute + inputs + script).max(axis=0) - (compute + script).max(axis=0)
        return np.asarray(self.seconds - late)

    def stretches(self) -> list[slice]:
        """The longest runs of iterations that have the same sizes and the same basis."""
        if not len(self.seconds):
            return []
        changes = (np.diff(self.samples, axis=1) != 0).any(axis=0)
        changes |= np.array([one != other for one, other in pairwise(self.bases)], dtype=bool)
        edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(self.seconds)]
        return [slice(start, stop) for start, stop in pairwise(edges)]
