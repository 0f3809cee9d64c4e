"""How much each worker claims while workers come and go: a load policy over those that are there."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, cast, final

import numpy as np

from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.equal import Equal
from evenstep.core.load.memory import limited
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
    own estimates and come with their next rows. The user's own sizes stay with their ranks.

    Args:
        load: The scheme's answer to *how much*.
        problem: As for all workers of the run, by rank.
    """

    def __init__(self, load: Load, problem: Problem) -> None:
        self._load = load
        self._steady = isinstance(load, Equal | Static)
        self._whole = problem
        self._minimum = int(problem.minimum.max())
        self._present: set[int] = set()
        self._changed = False
        self._members: tuple[int, ...] = ()
        self._policy: LoadPolicy = load.policy(problem.workers)
        self._problem = problem
        self._rows: dict[int, Sequence[int]] = {}
        self._largest: dict[int, int] = {}
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
        self._changed = True

    def begin_epoch(self, epoch: int) -> None:
        """Sizes are for this epoch from now on."""
        self._problem = replace(self._problem, epoch=epoch)
        self._sizes = None

    def observe(self, worker: int, row: Sequence[int]) -> None:
        """A worker's row of `Reports` for its latest iteration."""
        if worker not in self._present:
            return
        if self._changed:
            self._settle()
        if self._steady and row[-1] == self._largest.get(worker):
            return  # Such sizes do not follow speeds, and the limits are as they were.
        self._largest[worker] = row[-1]
        self._rows[worker] = row
        if len(self._rows) < len(self._members):
            return
        table = np.array([self._rows[member] for member in self._members], dtype=np.int64)
        self._rows = {}
        reports = Reports.from_table(table)
        self._policy.observe(reports)
        if not isinstance(self._load, Static):  # which refuses limits instead of keeping to them
            limits = self._whole.maximum[list(self._members)]
            self._problem = limited(self._problem, np.minimum(limits, reports.largest_size))
        self._sizes = None

    def all(self) -> dict[int, int]:
        """Every member's planned size, by rank; they sum to the global batch, as far as the members may hold it."""
        self._settle()
        if self._sizes is None:
            sizes = self._policy.allocate(self._problem).sizes.tolist() if self._members else []
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
        together = planned if unclaimed >= 2 * minimum else int(self._whole.maximum[worker])
        return unclaimed if unclaimed <= together else max(minimum, unclaimed - minimum)

    def _settle(self) -> None:
        """Make a policy for those that are there, if they have changed."""
        if not self._changed:
            return
        self._changed = False
        members = tuple(sorted(self._present))
        if members == self._members:
            return
        self._members = members
        self._rows = {}
        self._largest = {}
        self._sizes = None
        if not members:
            return
        chosen = list(members)
        maximum = self._whole.maximum[chosen]
        room = int((maximum // self._whole.multiple * self._whole.multiple).sum())
        load = self._load
        if isinstance(load, Static):
            load = replace(load, sizes=tuple(load.sizes[member] for member in members))
            room = min(room, sum(load.sizes))
        self._problem = replace(
            self._whole,
            # Who is left may not hold all of it.
            global_batch_size=min(self._whole.global_batch_size, room),
            minimum=self._whole.minimum[chosen],
            maximum=maximum,
            epoch=self._problem.epoch,
        )
        self._policy = load.policy(len(members))
        self._restore()

    def state_dict(self) -> State:
        """The policy's memory and whose it is."""
        self._settle()
        return {
            "members": list(self._members),
            "epoch": self._problem.epoch,
            "maximum": self._problem.maximum.tolist(),
            "policy": self._policy.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on with what was known, once the same workers have come back, and no others."""
        self._saved = state
        self.begin_epoch(cast("int", state["epoch"]))
        self._restore()

    def _restore(self) -> None:
        saved = self._saved
        if saved is None or not self._members or saved["members"] != list(self._members):
            return
        self._saved = None
        self._sizes = None
        self._problem = limited(self._problem, np.array(saved["maximum"], dtype=np.int64))
        self._policy.load_state_dict(cast("State", saved["policy"]))
