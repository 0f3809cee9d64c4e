"""How much each worker claims where groups of them take iterations together: a load policy inside each group."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast, final

import numpy as np

from evenstep.core.coordinate.sizes import SMALLEST_TAIL, Sizes
from evenstep.core.groups import Groups
from evenstep.core.load.allocate.shares import shares
from evenstep.core.load.base import Load
from evenstep.core.load.limits import SizeLimits
from evenstep.core.load.static import Static
from evenstep.core.values import Problem, State


@final
class GroupSizes:
    """As `Sizes`, for groups: each shares out its part of the global batch, which follows how many it is.

    Of N workers that are there, a group of n has n / N of the global batch, by largest remainder; of the user's own
    sizes it has those of its workers. When somebody comes or goes, every group's policy begins anew.

    Args:
        load: The scheme's answer to *how much*, inside a group.
        problem: As for all workers of the run, by rank.
        groups: Of all its ranks.
        present: Those who are there.
        epoch: The one under way.
        limits: What the workers may have; None: as the problem says until they report.
    """

    def __init__(
        self,
        load: Load,
        problem: Problem,
        groups: Groups,
        present: Iterable[int],
        epoch: int,
        limits: SizeLimits | None = None,
    ) -> None:
        self.groups = groups
        self._load = load
        self._problem = replace(problem, epoch=epoch)
        self._minimum = int(problem.minimum.max())
        self._group_of = {worker: number for number, group in enumerate(groups) for worker in group}
        self._present = set(present)
        self._limits = SizeLimits(load, problem) if limits is None else limits
        self._parts: dict[int, Sizes] | None = None
        """By group, of those that anybody is in; None where they have changed."""
        self._all: tuple[tuple[dict[int, int], ...], dict[int, int]] = ((), {})
        """The parts' sizes, and all of them together."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of those who are there, ascending."""
        return tuple(sorted(self._present))

    def join(self, worker: int) -> None:
        """This worker is there from now on."""
        self._present.add(worker)
        self._parts = None

    def leave(self, worker: int) -> None:
        """This worker is not there any more."""
        self._present.discard(worker)
        self._limits.leave(worker)
        self._parts = None

    def begin_epoch(self, epoch: int) -> None:
        """Sizes are for this epoch from now on."""
        self._problem = replace(self._problem, epoch=epoch)
        for part in self._settled().values():
            part.begin_epoch(epoch)

    def observe(self, worker: int, row: Sequence[int]) -> None:
        """A worker's row of `Reports` for its latest iteration."""
        if worker not in self._present:
            return
        parts = self._settled()
        if parts[self._group_of[worker]].observe(worker, row):  # What a group may not have is others' to do.
            batches = self._batches()
            for number, part in parts.items():
                part.share_out(batches[number])

    def all(self) -> dict[int, int]:
        """Every member's planned size, by rank; the same object as long as none has changed."""
        parts = tuple(part.all() for part in self._settled().values())
        known, merged = self._all
        if len(known) != len(parts) or any(one is not other for one, other in zip(known, parts, strict=True)):
            merged = {worker: size for part in parts for worker, size in part.items()}
            self._all = parts, merged
        return merged

    def slice_of(self, workers: tuple[int, ...], unclaimed: int) -> dict[int, int]:
        """The sizes of these members in the next iteration of the group of each.

        Towards the end of an epoch it is less, so that all groups finish at about once, and with the epoch at latest.
        """
        sizes: dict[int, int] = {}
        together: dict[int, list[int]] = {}
        for worker in workers:
            together.setdefault(self._group_of[worker], []).append(worker)
        for group, members in together.items():
            part = self._settled()[group]
            planned = part.all()
            taken = self._slice(sum(planned[worker] for worker in members), len(members), unclaimed)
            sizes |= part.slice_of(tuple(members), taken)
            unclaimed -= taken
        return sizes

    def next_of(self, worker: int, unclaimed: int) -> int:
        """How much a member claims alone."""
        return self._settled()[self._group_of[worker]].next_of(worker, unclaimed)

    def _slice(self, planned: int, members: int, unclaimed: int) -> int:
        """How much of what is unclaimed so many members of a group take, where they would take `planned`."""
        batch = self._problem.global_batch_size
        if unclaimed >= batch:
            return planned
        least = max(members * self._minimum, -(-planned // SMALLEST_TAIL), -(-unclaimed * planned // batch))
        taken = min(planned, unclaimed, least)
        if not 0 < unclaimed - taken < self._minimum:
            return taken
        # Nobody is to be left with less than can be computed on, where that can be helped.
        return unclaimed if unclaimed <= planned else max(self._minimum, unclaimed - self._minimum)

    def _settled(self) -> dict[int, Sizes]:
        """The groups' own sizes, made anew where somebody has come or gone."""
        if self._parts is None:
            self._parts = {}
            for number, (members, batch) in enumerate(zip(self._here(), self._batches(), strict=True)):
                if members:
                    problem = replace(self._problem, global_batch_size=batch)
                    part = self._parts[number] = Sizes(self._load, problem, self._limits)
                    for worker in members:
                        part.join(worker)
        return self._parts

    def _here(self) -> list[list[int]]:
        """Those of each group who are there."""
        return [[worker for worker in group if worker in self._present] for group in self.groups]

    def _batches(self) -> list[int]:
        """Each group's part of the global batch."""
        here = self._here()
        if isinstance(self._load, Static):
            return [sum(self._load.sizes[worker] for worker in members) for members in here]
        if not self._present:
            return [0] * len(here)
        lower = np.array([self._limits.least(members) for members in here], dtype=np.int64)
        upper = np.array([self._limits.room(members) for members in here], dtype=np.int64)
        counts = np.array([len(members) for members in here], dtype=np.int64)
        # Those who are there may not have all of it.
        total = min(self._problem.global_batch_size, int(upper.sum()))
        return list(map(int, shares(total, counts, lower=lower, upper=upper, multiple=self._problem.multiple)))

    # A checkpoint.

    def state_dict(self) -> State:
        """The groups, the limits, and the memory of each group's policy."""
        return {
            "groups": [list(group) for group in self.groups],
            "limits": self._limits.state_dict(),
            "parts": [[number, part.policy_state()] for number, part in self._settled().items()],
        }

    def load_state_dict(self, state: State) -> None:
        """Go on with the limits, and with what was known of these groups where the same workers are there."""
        self._limits.load_state_dict(cast("Any", state["limits"]))
        parts = self._settled()
        for number, part in cast("Any", state["parts"]):
            if number in parts:
                parts[number].load_policy_state(part)
