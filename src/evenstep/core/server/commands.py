"""What reaches the coordinator of a run on servers, and what it has its driver do; names of pushes."""

from typing import NamedTuple, TypeAlias, final

from evenstep.core.samples.claims import Claim
from evenstep.core.sync.base import Regroup, Release

PushKey: TypeAlias = tuple[int, int, int]
"""Names a push for ever: worker, incarnation, sequence."""


@final
class Arrival(NamedTuple):
    """A worker's push, staged whole.

    `claim` is what it was computed on, on the weights of `version`; `row` is its row of `Reports`. `samples` is 0 where
    nothing of it is to be committed (a skipped step); the claim is then done with all the same.
    """

    key: PushKey
    claim: int
    version: int
    samples: int
    units: int
    row: tuple[int, ...]

    @property
    def worker(self) -> int:
        """Whose it is."""
        return self.key[0]


@final
class Update(NamedTuple):
    """Fold these staged pushes into the parameters, as one commit.

    `pushes` has what each counts, summing to 1. `share` is the part of a global batch that the commit stands for;
    `staleness` is the most versions that any of the pushes had missed, and `behind` the same in global batches.
    `version` is the parameters' version afterwards.
    """

    pushes: tuple[tuple[PushKey, float], ...]
    share: float
    staleness: int
    behind: float
    version: int


@final
class Discard(NamedTuple):
    """Forget this staged push: it was empty."""

    key: PushKey


@final
class Answer(NamedTuple):
    """Answer this worker, with the weights as they are now.

    `claims` are what to compute on next, one after another, beside what it holds. None: nothing is left for it, and
    `over` says whether the pass has ended, or whether it may ask again, with empty hands, and wait. `release` tells how
    long it was held, where it was.
    """

    worker: int
    claims: tuple[Claim, ...]
    over: bool
    version: int
    release: Release | None = None


CoordinatorCommand: TypeAlias = Update | Discard | Answer | Regroup
