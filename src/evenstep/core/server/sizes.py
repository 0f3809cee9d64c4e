"""How much each worker claims while workers come and go: a load policy over those that are there."""

from dataclasses import replace
from typing import cast, final

import numpy as np

from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.memory import limited
from evenstep.core.samples.assignment import short_slice_sizes
from evenstep.core.values import Problem, Reports, State

SMALLEST_TAIL = 4
"""A claim never shrinks below this part (a quarter) of its worker's size, so that fixed costs stay small."""


@final
class Sizes:
    """Everybody's batch size from everybody's latest report.

    Without a barrier there is no iteration that all report on. The policy is fed whenever everyone has pushed since it
    was fed last, with the latest row of each: the slowest worker sets the pace of decisions, not of the work. When a
    worker joins or leaves, a new policy begins for those that are there; speeds are the workers' own estimates and
    come with their next rows.

    Args:
        load: The scheme's answer to *how much*.
        problem: As for all workers of the run, by rank.
    """

    def __init__(self, load: Load, problem: Problem) -> None:
        self._load = load
        self._whole = problem
        self._limits = problem.maximum
        self._members: tuple[int, ...] = ()
        self._policy: LoadPolicy = load.policy(problem.workers)
        self._problem = problem
        self._rows: dict[int, list[int]] = {}
        self._sizes: dict[int, int] | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of those who share the batch, ascending."""
        return self._members

    def set_members(self, members: tuple[int, ...]) -> None:
        """These share the global batch from now on."""
        if members == self._members:
            return
        self._members = members
        self._rows = {}
        self._sizes = None
        if not members:
            return
        chosen = np.array(members)
        maximum = self._limits[chosen]
        room = int((maximum // self._whole.multiple * self._whole.multiple).sum())
        self._problem = replace(
            self._whole,
            # Who is left may not hold all of it.
            global_batch_size=min(self._whole.global_batch_size, room),
            minimum=self._whole.minimum[chosen],
            maximum=maximum,
            epoch=self._problem.epoch,
        )
        self._policy = self._load.policy(len(members))

    def begin_epoch(self, epoch: int) -> None:
        """Sizes are for this epoch from now on."""
        self._problem = replace(self._problem, epoch=epoch)
        self._sizes = None

    def observe(self, worker: int, row: list[int]) -> None:
        """A worker's row of `Reports` for its latest iteration."""
        if worker not in self._members:
            return
        self._rows[worker] = row
        if len(self._rows) < len(self._members):
            return
        table = np.array([self._rows[member] for member in self._members], dtype=np.int64)
        self._rows = {}
        reports = Reports.from_table(table)
        self._policy.observe(reports)
        self._problem = limited(self._problem, np.minimum(self._limits[list(self._members)], reports.largest_size))
        self._sizes = None

    def all(self) -> dict[int, int]:
        """Every member's planned size, by rank; they sum to the global batch."""
        if self._sizes is None:
            sizes = self._policy.allocate(self._problem).sizes.tolist()
            self._sizes = dict(zip(self._members, sizes, strict=True))
        return self._sizes

    def slice_of(self, workers: tuple[int, ...], unclaimed: int) -> dict[int, int]:
        """The sizes of these workers in one iteration that they take together, which ends with the epoch at latest."""
        planned = self.all()
        sizes = np.array([planned.get(worker, 0) for worker in workers], dtype=np.int64)
        if unclaimed < int(sizes.sum()):
            sizes = short_slice_sizes(sizes, unclaimed, int(self._problem.minimum.max()))
        return dict(zip(workers, sizes.tolist(), strict=True))

    def next_of(self, worker: int, unclaimed: int) -> int:
        """How much a worker claims next, alone; towards the end of an epoch less, so that all finish at about once."""
        size = self.all().get(worker, 0)
        whole = self._problem.global_batch_size
        if unclaimed >= whole:
            return size
        minimum = int(self._problem.minimum.max())
        smallest = max(minimum, -(-size // SMALLEST_TAIL))
        size = min(size, max(smallest, -(-unclaimed * size // whole)))
        # Leave nobody with less than can be computed on.
        return unclaimed if 0 < unclaimed - size < minimum else size

    def state_dict(self) -> State:
        """The policy's memory and whose it is."""
        return {
            "members": list(self._members),
            "epoch": self._problem.epoch,
            "maximum": self._problem.maximum.tolist(),
            "policy": self._policy.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on with what was known, where the same workers come back."""
        self.set_members(tuple(cast("list[int]", state["members"])))
        if not self._members:
            return
        self.begin_epoch(cast("int", state["epoch"]))
        self._problem = limited(self._problem, np.array(state["maximum"], dtype=np.int64))
        self._policy.load_state_dict(cast("State", state["policy"]))
