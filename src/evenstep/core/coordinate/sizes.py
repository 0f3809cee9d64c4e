"""The workers that are here, the size limit of each, and how much each claims next."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast, final

import numpy as np

from evenstep.core.errors import ConfigError
from evenstep.core.groups import Groups
from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.checked import CheckedPolicy, load_policy
from evenstep.core.load.equal import equal_sizes
from evenstep.core.load.limits import SizeLimits
from evenstep.core.load.shares import shares, short_slice_sizes
from evenstep.core.samples.pass_costs import ClaimBounds
from evenstep.core.values import Problem, Reports, State


@dataclass(slots=True, eq=False)
class _Part:
    """The workers of a group that are here, and the policy that divides their part of the global batch.

    Attributes:
        batch: their part, in samples.
        problem: the problem that the latest sizes solve.
        rows: each member's latest report since the policy was fed.
        sizes: planned sizes by rank; empty if they must be planned again.
    """

    members: tuple[int, ...]
    policy: LoadPolicy
    problem: Problem
    batch: int = 0
    rows: dict[int, Sequence[int]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)


@final
class Sizes:
    """The batch size of each worker, from the latest reports: one load policy for all workers, or one for each group.

    Without a barrier there is no iteration that all workers report on. So a policy is fed when all its workers have
    pushed since the last time, with the latest row of each: the slowest worker sets the pace of decisions, not of the
    work. When a worker joins or leaves a group, that group gets a new policy, which recalls what was known of its
    workers. The user's own sizes stay with their ranks.

    Of N workers, a group of n has n / N of the global batch, by largest remainder; with the user's own sizes it has the
    sum of its workers' sizes. No worker is planned more than its limit, so the present workers may have less than the
    global batch together. The `problem` is that of all workers of the run, by rank.
    """

    def __init__(self, load: Load, problem: Problem) -> None:
        load_policy(load, problem.workers)  # Refuses a load without a valid policy before any worker joins.
        self.failure: str | None = None
        self._load = load
        self._problem = problem
        self._minimum = int(problem.minimum.max())
        self._limits = SizeLimits(load, problem)
        self._groups: Groups = (tuple(range(problem.workers)),)
        self._present: set[int] = set()
        self._changed = False  # Workers have come or gone since the parts were made.
        self._parts: list[_Part] = []
        self._part_of: dict[int, _Part] = {}
        self._batch = 0  # The sum over all parts.
        self._all: dict[int, int] | None = None
        # Policies of a checkpoint whose workers are not back, by members.
        self._saved: dict[tuple[int, ...], State] = {}

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the workers that share the global batch, ascending."""
        return tuple(sorted(self._present))

    def join(self, worker: int) -> None:
        """This worker shares the global batch from now on."""
        self._present.add(worker)
        self._changed = True

    def leave(self, worker: int) -> None:
        """This worker no longer shares the global batch."""
        self._present.discard(worker)
        self._limits.leave(worker)
        self._changed = True

    def regroup(self, groups: Groups) -> None:
        """From now on, the workers of each of these groups take iterations together, under a new policy."""
        self._groups = groups
        self._parts = []
        self._changed = True

    def begin_epoch(self, epoch: int) -> None:
        """From now on sizes are for this epoch."""
        self._problem = replace(self._problem, epoch=epoch)
        for part in self._parts:
            part.sizes = {}

    def observe(self, worker: int, row: Sequence[int]) -> None:
        """Take in a worker's row of `Reports` for its latest iteration."""
        if self._changed:
            self._settle()
        part = self._part_of.get(worker)
        if part is None:
            return
        if self._limits.report(worker, row[-1]) and self._binds(part, worker):
            part.sizes = {}
            self._share_out()
        if self._load.follows_speed:
            part.rows[worker] = row
            if len(part.rows) == len(part.members):
                table = np.array([part.rows[member] for member in part.members], dtype=np.int64)
                part.rows = {}
                part.policy.observe(Reports.from_table(table))
                part.sizes = {}

    def all(self) -> dict[int, int]:
        """The planned size of every worker that is here, by rank; the same object as long as none has changed."""
        self._settle()
        planned = [part.sizes or self._plan(part) for part in self._parts]
        if self._all is None:
            self._all = {worker: size for sizes in planned for worker, size in sizes.items()}
        return self._all

    def next_of(self, worker: int, unclaimed: int) -> int:
        """The part of the `unclaimed` samples (1 or more) that this worker claims next, alone; in average samples."""
        if self._changed:
            self._settle()
        part = self._part_of[worker]
        planned = (part.sizes or self._plan(part))[worker]
        if unclaimed >= self._batch + self._minimum:
            return planned
        return self._taken(planned, (worker,), unclaimed)

    def slice_of(self, workers: Sequence[int], unclaimed: int) -> dict[int, int]:
        """The sizes of these workers in their next iteration, which the workers of a group take together."""
        sizes: dict[int, int] = {}
        for members in self.together(workers):
            part = self._part_of[members[0]]
            planned = np.array([(part.sizes or self._plan(part))[worker] for worker in members], dtype=np.int64)
            whole = int(planned.sum())
            # One group is a barrier: it takes the epoch's slices, whatever is left after them.
            taken = min(whole, unclaimed) if self.one_slice else self._taken(whole, members, unclaimed)
            if taken < whole:
                planned = short_slice_sizes(planned, taken, self._minimum)
            sizes |= {members[0]: taken} if taken > whole else dict(zip(members, planned.tolist(), strict=True))
            unclaimed -= taken
        return sizes

    def together(self, workers: Sequence[int]) -> list[list[int]]:
        """Group these workers by the slice that they take together."""
        self._settle()
        found: dict[_Part, list[int]] = {}
        for worker in workers:
            found.setdefault(self._part_of[worker], []).append(worker)
        return list(found.values())

    @property
    def one_slice(self) -> bool:
        """True if all workers take each iteration together, in slices of the epoch."""
        return len(self._groups) == 1

    def bounds(self, worker: int) -> ClaimBounds:
        """Size limits of this worker's claims when samples differ in cost."""
        return ClaimBounds(fewest=self._minimum, most=self._limits.most, room=self._limits.of(worker))

    def _taken(self, planned: int, workers: Sequence[int], unclaimed: int) -> int:
        """The part of the unclaimed samples that these workers claim together if `planned` is their size.

        Towards the end of an epoch claims are smaller, so that all workers finish at about the same time and, if
        possible, no worker is left with fewer samples than it can compute on; but at least a quarter of the size, so
        that fixed costs stay small.
        """
        batch, minimum, taken = self._batch, self._minimum, planned
        if unclaimed < batch:
            least = max(len(workers) * minimum, -(-planned // 4), -(-unclaimed * planned // batch))
            taken = min(planned, least)
        if not 0 < unclaimed - taken < minimum:
            return min(taken, unclaimed)
        alone = len(workers) == 1 and unclaimed < 2 * minimum
        most = self._limits.of(workers[0]) if alone else planned
        return unclaimed if unclaimed <= most else max(minimum, unclaimed - minimum)

    # Parts.

    def _settle(self) -> None:
        """If workers have come or gone, form new parts; unchanged parts are kept."""
        if not self._changed:
            return
        self._changed = False
        known = {part.members: part for part in self._parts}
        here = [tuple(worker for worker in group if worker in self._present) for group in self._groups]
        self._parts = [known.get(members) or self._new_part(members) for members in here if members]
        self._part_of = {worker: part for part in self._parts for worker in part.members}
        self._all = None
        for part in self._parts:
            part.sizes = {}
        self._share_out()

    def _new_part(self, members: tuple[int, ...]) -> _Part:
        policy = load_policy(self._load.for_workers(members), len(members))
        if members in self._saved:
            policy.load_state_dict(self._saved.pop(members))
        else:
            before = [(worker, self._part_of.get(worker)) for worker in members]
            policy.recall(
                [None if part is None else (part.policy, part.members.index(worker)) for worker, part in before]
            )
        return _Part(members, policy, self._problem)

    def _share_out(self) -> None:
        """Divide the global batch among the parts, up to what their workers may hold."""
        whole, given = self._problem.global_batch_size, self._load.given_sizes
        rooms = [self._limits.room(part.members) for part in self._parts]
        if given is not None:
            own = [sum(given[member] for member in part.members) for part in self._parts]
            batches = [min(whole, *both) for both in zip(own, rooms, strict=True)]
        elif len(rooms) <= 1:
            batches = [min(whole, room) for room in rooms]
        else:
            counts = np.array([len(part.members) for part in self._parts], dtype=np.int64)
            least = np.array([self._limits.least(part.members) for part in self._parts], dtype=np.int64)
            upper = np.array(rooms, dtype=np.int64)
            total = min(whole, sum(rooms))
            batches = shares(total, counts, lower=least, upper=upper, multiple=self._problem.multiple).tolist()
        self._batch = sum(batches)
        for part, batch in zip(self._parts, batches, strict=True):
            if batch != part.batch:
                part.batch, part.sizes = batch, {}

    def _plan(self, part: _Part) -> dict[int, int]:
        part.problem = replace(self._limits.shared_by(part.members, part.batch), epoch=self._problem.epoch)
        try:
            sizes = part.policy.allocate(part.problem).sizes
        except ConfigError as error:
            if not isinstance(part.policy, CheckedPolicy):
                raise
            # Each worker is told with its next push; a plan may also be made when there is no worker to tell.
            self.failure, sizes = str(error), equal_sizes(part.problem)
        part.sizes = dict(zip(part.members, sizes.tolist(), strict=True))
        self._all = None
        return part.sizes

    def _binds(self, part: _Part, worker: int) -> bool:
        """True if a new limit of this worker matters: its size is above it, or was held down by the previous limit."""
        if not part.sizes:
            return True
        size, before = part.sizes[worker], int(part.problem.maximum[part.members.index(worker)])
        return size > self._limits.of(worker) or size + part.problem.multiple > before

    # A checkpoint.

    def state_dict(self) -> State:
        """The limits, and each policy's state with the ranks of its workers."""
        self._settle()
        policies = self._saved | {part.members: part.policy.state_dict() for part in self._parts}
        return {
            "limits": self._limits.state_dict(),
            "epoch": self._problem.epoch,
            "policies": [[list(members), policy] for members, policy in policies.items()],
        }

    def load_state_dict(self, state: State) -> None:
        """Restore the limits at once, and a policy once exactly the same workers are together again."""
        self._limits.load_state_dict(cast("State", state["limits"]))
        saved = cast("list[tuple[list[int], State]]", state["policies"])
        self._saved = {tuple(members): policy for members, policy in saved}
        self.begin_epoch(cast("int", state["epoch"]))
        self._parts = []
        self._changed = True
