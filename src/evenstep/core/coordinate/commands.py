"""What reaches the coordinator of a run on servers, and what it has its driver do; names of pushes."""

from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, final

from evenstep.core.samples.claims import Claim
from evenstep.core.sync.base import Regroup, Release

PushKey: TypeAlias = tuple[int, int, int]
"""Names a push for ever: worker, incarnation, sequence."""


@final
@dataclass(init=False, slots=True, unsafe_hash=True)
class Arrival:
    """A worker's push, staged whole.

    `claim` is what it was computed on, on the weights of `version`; `row` is its row of `Reports`. `samples` is 0 where
    nothing of it is to be committed (a skipped step); the claim is then done with all the same.
    """

    key: Final[PushKey]
    claim: Final[int]
    version: Final[int]
    samples: Final[int]
    units: Final[int]
    row: Final[tuple[int, ...]]

    def __init__(self, key: PushKey, claim: int, version: int, samples: int, units: int, row: tuple[int, ...]) -> None:
        self.key = key
        self.claim = claim
        self.version = version
        self.samples = samples
        self.units = units
        self.row = row

    @property
    def worker(self) -> int:
        """Whose it is."""
        return self.key[0]


@final
@dataclass(init=False, slots=True, unsafe_hash=True)
class Update:
    """Fold these staged pushes into the parameters, as one commit.

    `pushes` has what each counts, summing to 1. `share` is the part of a global batch that the commit stands for;
    `staleness` is the most versions that any of the pushes had missed, and `behind` the same in global batches.
    `version` is the parameters' version afterwards.
    """

    pushes: Final[tuple[tuple[PushKey, float], ...]]
    share: Final[float]
    staleness: Final[int]
    behind: Final[float]
    version: Final[int]

    def __init__(
        self, pushes: tuple[tuple[PushKey, float], ...], share: float, staleness: int, behind: float, version: int
    ) -> None:
        self.pushes = pushes
        self.share = share
        self.staleness = staleness
        self.behind = behind
        self.version = version


@final
class Discard(NamedTuple):
    """Forget this staged push: it was empty."""

    key: PushKey


@final
@dataclass(init=False, slots=True, unsafe_hash=True)
class Answer:
    """Answer this worker, with the weights as they are now.

    `claims` are what to compute on next, one after another, beside what it holds. None: nothing is left for it, and
    `over` says whether the pass has ended, or whether it may ask again, with empty hands, and wait. `release` tells how
    long it was held, where it was.
    """

    worker: Final[int]
    claims: Final[tuple[Claim, ...]]
    over: Final[bool]
    version: Final[int]
    release: Final[Release | None]

    def __init__(
        self, worker: int, claims: tuple[Claim, ...], over: bool, version: int, release: Release | None = None
    ) -> None:
        self.worker = worker
        self.claims = claims
        self.over = over
        self.version = version
        self.release = release


CoordinatorCommand: TypeAlias = Update | Discard | Answer | Regroup
