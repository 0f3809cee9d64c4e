"""How much each worker claims while workers come and go: a load policy over those that are there."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, cast, final

import numpy as np

from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.equal import Equal
from evenstep.core.load.limits import SizeLimits
from evenstep.core.load.static import Static
from evenstep.core.samples.assignment import short_slice_sizes
from evenstep.core.values import Problem, Reports, State

SMALLEST_TAIL: Final = 4
"""A claim never shrinks below this part (a quarter) of its worker's size, so that fixed costs stay small."""


@final
class Sizes:
    """Everybody's batch size from everybody's latest report.

    Without a barrier there is no iteration that all report on. The policy is fed whenever everyone has pushed since it
    was fed last, with the latest row of each: the slowest worker sets the pace of decisions, not of the work. When a
    worker joins or leaves, a new policy begins for those that are there, once somebody asks; speeds are the workers'
    own estimates and come with their next rows. The user's own sizes stay with their ranks. Nobody is planned to have
    more than its limit, so those that are there may not have the whole global batch between them.

    Args:
        load: The scheme's answer to *how much*.
        problem: As for all workers of the run, by rank.
        limits: What its workers may have; None: as the problem says until they report.
    """

    def __init__(self, load: Load, problem: Problem, limits: SizeLimits | None = None) -> None:
        self._load = load
        self._steady = isinstance(load, Equal | Static)
        self._limits = SizeLimits(load, problem) if limits is None else limits
        self._whole = problem.global_batch_size
        self._minimum = int(problem.minimum.max())
        self._present: set[int] = set()
        self._changed = False
        self._members: tuple[int, ...] = ()
        self._policy: LoadPolicy = load.policy(problem.workers)
        self._problem = problem
        self._rows: dict[int, Sequence[int]] = {}
        self._sizes: dict[int, int] | None = None
        self._saved: State | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of those who share the batch, ascending."""
        self._settle()
        return self._members

    def join(self, worker: int) -> None:
        """This worker shares the global batch from now on."""
        self._present.add(worker)
        self._changed = True

    def leave(self, worker: int) -> None:
        """This worker does not share the global batch any more."""
        self._present.discard(worker)
        self._limits.leave(worker)
        self._changed = True

    def begin_epoch(self, epoch: int) -> None:
        """Sizes are for this epoch from now on."""
        self._problem = replace(self._problem, epoch=epoch)
        self._sizes = None

    def observe(self, worker: int, row: Sequence[int]) -> bool:
        """A worker's row of `Reports` for its latest iteration; whether its limit gives reason for other sizes."""
        if worker not in self._present:
            return False
        if self._changed:
            self._settle()
        binds = self._limits.report(worker, row[-1]) and self._binds(worker)
        if binds:
            self._sizes = None
        if not self._steady:  # Else no size follows a speed.
            self._rows[worker] = row
            if len(self._rows) == len(self._members):
                table = np.array([self._rows[member] for member in self._members], dtype=np.int64)
                self._rows = {}
                self._policy.observe(Reports.from_table(table))
                self._sizes = None
        return binds

    def share_out(self, global_batch_size: int) -> None:
        """The members share this many samples from now on."""
        if global_batch_size != self._whole:
            self._whole = global_batch_size
            self._sizes = None

    def all(self) -> dict[int, int]:
        """Every member's planned size, by rank; they sum to the global batch, or to what the members may have of it."""
        self._settle()
        if self._sizes is None:
            sizes: list[int] = []
            if self._members:
                self._problem = self._problem_of_now()
                sizes = self._policy.allocate(self._problem).sizes.tolist()
            self._sizes = dict(zip(self._members, sizes, strict=True))
        return self._sizes

    def slice_of(self, workers: tuple[int, ...], unclaimed: int) -> dict[int, int]:
        """The sizes of these members in one iteration that they take together, which ends with the epoch at latest."""
        planned = self.all()
        sizes = np.array([planned[worker] for worker in workers], dtype=np.int64)
        if unclaimed < int(sizes.sum()):
            sizes = short_slice_sizes(sizes, unclaimed, self._minimum)
        return dict(zip(workers, sizes.tolist(), strict=True))

    def next_of(self, worker: int, unclaimed: int) -> int:
        """How much of what is unclaimed (1 or more) a member claims next, alone.

        Towards the end of an epoch it is less, so that all finish at about once; and nobody is left with less than can
        be computed on, where that can be helped.
        """
        sizes = self._sizes
        if sizes is None or self._changed:
            sizes = self.all()
        planned = size = sizes[worker]
        batch, minimum = self._problem.global_batch_size, self._minimum
        if unclaimed >= batch + minimum:
            return planned
        if unclaimed < batch:
            size = min(planned, max(minimum, -(-planned // SMALLEST_TAIL), -(-unclaimed * planned // batch)))
        if not 0 < unclaimed - size < minimum:
            return min(size, unclaimed)
        together = planned if unclaimed >= 2 * minimum else self._limits.of(worker)
        return unclaimed if unclaimed <= together else max(minimum, unclaimed - minimum)

    def _settle(self) -> None:
        """Make a policy for those that are there, if they have changed."""
        if not self._changed:
            return
        self._changed = False
        self._sizes = None
        members = tuple(sorted(self._present))
        if members == self._members:
            return
        self._members = members
        self._rows = {}
        if not members:
            return
        load = self._load
        if isinstance(load, Static):
            load = replace(load, sizes=tuple(load.sizes[member] for member in members))
        self._policy = load.policy(len(members))
        self._restore()

    def _problem_of_now(self) -> Problem:
        """What the members' sizes must satisfy."""
        members, whole = self._members, self._whole
        if isinstance(self._load, Static):
            whole = min(whole, sum(self._load.sizes[member] for member in members))
        return replace(self._limits.shared_by(members, whole), epoch=self._problem.epoch)

    def _binds(self, worker: int) -> bool:
        """Whether another limit of this worker's makes a difference: its size is above it, or was held down by one."""
        if self._sizes is None:
            return True
        size, multiple = self._sizes[worker], self._problem.multiple
        before = int(self._problem.maximum[self._members.index(worker)])
        return size > self._limits.of(worker) or size + multiple > before

    # A checkpoint.

    def state_dict(self) -> State:
        """The limits, the policy's memory and whose it is."""
        return {"limits": self._limits.state_dict(), **self.policy_state()}

    def load_state_dict(self, state: State) -> None:
        """Go on with what was known: of the limits at once, of speeds when the same workers are back and no others."""
        self._limits.load_state_dict(cast("State", state["limits"]))
        self.load_policy_state(state)

    def policy_state(self) -> State:
        """The same without the limits, which others keep."""
        self._settle()
        return {
            "members": list(self._members),
            "epoch": self._problem.epoch,
            "policy": self._policy.state_dict(),
        }

    def load_policy_state(self, state: State) -> None:
        """Go on with what was known of speeds, once the same workers have come back, and no others."""
        self._saved = state
        self.begin_epoch(cast("int", state["epoch"]))
        self._restore()

    def _restore(self) -> None:
        saved = self._saved
        if saved is None or not self._members or saved["members"] != list(self._members):
            return
        self._saved = None
        self._sizes = None
        self._policy.load_state_dict(cast("State", saved["policy"]))
