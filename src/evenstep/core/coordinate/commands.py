"""Messages to the coordinator of a run on servers, and the commands that its driver carries out."""

from typing import TypeAlias, final

from msgspec import Struct

from evenstep.core.groups import Regroup
from evenstep.core.samples.claims import Claim
from evenstep.core.sync.base import Release

PushKey: TypeAlias = tuple[int, int, int]
"""Unique name of a push: worker, incarnation, sequence."""


@final
class Arrival(Struct, frozen=True, gc=False):
    """A worker's push, staged on every shard.

    Attributes:
        key: names the push.
        claim: number of the claim that it was computed on. The worker's older claims are finished: the push was
            computed on them too, or the worker has skipped them.
        version: version of the weights that it was computed on.
        samples: 0 if there is nothing to commit (a skipped step); the claim is finished all the same.
        units: weight within a commit.
        row: the worker's row of `Reports`.
    """

    key: PushKey
    claim: int
    version: int
    samples: int
    units: float
    row: tuple[int, ...]


@final
class Apply(Struct, frozen=True, gc=False):
    """Fold these staged pushes into the parameters, as one commit.

    Attributes:
        pushes: each with its weight; the weights sum to 1.
        share: part of a global batch that the commit stands for.
        staleness: the most versions that any of the pushes missed.
        behind: the staleness in global batches.
        version: the parameters' version afterwards.
    """

    pushes: tuple[tuple[PushKey, float], ...]
    share: float
    staleness: int
    behind: float
    version: int


@final
class Answer(Struct, frozen=True, gc=False):
    """Answer this worker, with the weights as they are now.

    Attributes:
        worker: rank.
        claims: further claims to compute on, in this order, besides those that it holds. If empty, nothing is left for
            it now: the pass has ended (`over`), or the worker may ask again once it holds nothing, and wait.
        over: whether the pass has ended.
        whole: whether the worker gets these very weights: its first ones, and those with which all leave a pass. Others
            may come looking ahead, or as a rounded difference from those that it has, and not at all if it has them.
        version: version of the weights.
        release: how long the worker was held; None if it was not.
    """

    worker: int
    claims: tuple[Claim, ...]
    over: bool
    whole: bool
    version: int
    release: Release | None = None


@final
class Given(Struct, frozen=True, gc=False):
    """Give this worker, which asked for more and keeps computing, further claims; it keeps its present weights."""

    worker: int
    claims: tuple[Claim, ...]


CoordinatorCommand: TypeAlias = Apply | Answer | Given | Regroup
