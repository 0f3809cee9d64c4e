"""Barriers inside groups, and any other policy between them: a group is a worker to its parent. Grouped servers."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, cast, final

from evenstep.core.errors import ProtocolError
from evenstep.core.groups import ByRank, Grouping, Groups, IterationTimes
from evenstep.core.sync.barrier import BarrierPolicy
from evenstep.core.sync.base import Command, Commit, Push, Regroup, Release, Sync, SyncPolicy, SyncStatistics
from evenstep.core.sync.unbounded import Unbounded
from evenstep.core.values import State

_ROUNDS: Final = 5
"""Groups are reconsidered when there have been so many pushes for each worker."""
_WHOLE: Final = 0.9
"""An iteration of less than this part of what its group takes otherwise is cut short by the end of its pass."""


@final
class GroupedPolicy:
    """Grouped parameter servers (Basu et al., HiPC 2018): a barrier in each group, the `across` policy between groups.

    The pushes of a group are one push to the parent, the mean of its members weighted by units; when the parent
    releases the group, all its members are released on the same weights. One group of all workers is a barrier, and
    groups of one worker each are the parent's policy.

    The paper does not say how workers are assigned, nor when that changes: `grouping` does. Groups are formed anew
    where nobody is in a pass, and else by one barrier across all: each group that arrives is held until all have, and
    leads begin anew.

    A worker that joins takes part in the iteration that its group is in. A release's lead and bound are its group's.
    """

    def __init__(self, *, workers: int, grouping: Grouping, across: Sync) -> None:
        self._grouping = grouping
        self._groups: Groups = grouping.form(workers)
        self._told = False
        """Whether a command has told the groups."""
        self._across_part = across
        self._workers = workers
        self._next: tuple[Groups, str] | None = None
        """What to form once all groups have arrived."""
        self._began: dict[int, float] = {}
        """When each of those who have joined was released, or has arrived."""
        self._times = IterationTimes()
        self._since_considered = 0
        self._pushes: dict[int, int] = {}
        self._held_seconds: dict[int, float] = {}
        self._largest_lead = 0
        self._make()

    def _make(self) -> None:
        """New policies for the groups as they are, which nobody has joined."""
        self._group_of = {worker: number for number, group in enumerate(self._groups) for worker in group}
        self._inside = [BarrierPolicy() for _ in self._groups]
        self._members: list[set[int]] = [set() for _ in self._groups]
        self._across = self._across_part.policy(len(self._groups))
        self._arrived: dict[int, None] = {}
        """Groups that have pushed, or come, and are not released."""
        self._iterations = [0] * len(self._groups)
        self._took: list[dict[int, tuple[float, int]]] = [{} for _ in self._groups]
        """Seconds and samples of each member that has pushed in its group's iteration."""
        self._most = [0.0] * len(self._groups)
        """What each group takes in an iteration, over what would be its by how many it is."""
        self._folded: dict[tuple[int, int], tuple[Push, ...]] = {}
        """What a group's push to the parent is made of, by group and iteration."""
        self._latest: dict[int, Release] = {}
        """How each group was released last."""

    # Events.

    def on_join(self, worker: int, now: float) -> list[Command]:
        commands: list[Command] = []
        if not self._began:
            reformed = self._reconsidered()
            if reformed is not None:
                self._groups, reason = reformed
                self._make()
                commands.append(self._tell(reason))
        if not self._told:
            commands.append(self._tell("as the run begins"))
        group = self._group(worker)
        self._inside[group].on_join(worker, now)
        self._began[worker] = now
        self._pushes.setdefault(worker, 0)
        self._held_seconds.setdefault(worker, 0.0)
        first = not self._members[group]
        self._members[group].add(worker)
        if first:
            # Where groups are about to be formed anew, the parent's release waits for that.
            commands += self._from_parent(self._across.on_join(group, now), now)
        elif group not in self._arrived:
            commands.append(self._release(worker, self._latest[group], now))
        return commands + self._reform_once_all_have_arrived(now)

    def on_push(self, push: Push, now: float) -> list[Command]:
        worker = push.worker
        group = self._group(worker)
        if group in self._arrived:
            raise ProtocolError(
                f"worker {worker} pushed its iteration {push.iteration} while its group is held:"
                " only a worker that has joined and was released since its last push may push"
            )
        decided = self._inside[group].on_push(push, now)  # First of all, since it refuses what cannot be.
        self._pushes[worker] += 1
        self._took[group][worker] = now - self._began[worker], push.samples
        self._began[worker] = now
        self._since_considered += 1
        return self._from_inside(group, decided, now) + self._reform_once_all_have_arrived(now)

    def on_leave(self, worker: int, now: float) -> list[Command]:
        group = self._group(worker)
        decided = self._inside[group].on_leave(worker, now)
        del self._began[worker]
        self._members[group].discard(worker)
        commands = self._from_inside(group, decided, now)
        if not self._members[group]:
            self._arrived.pop(group, None)
            commands += self._from_parent(self._across.on_leave(group, now), now)
        return commands + self._reform_once_all_have_arrived(now)

    # Between the two.

    def _from_inside(self, group: int, decided: Iterable[Command], now: float) -> list[Command]:
        """The group's barrier has opened, or not: its pushes become one to the parent."""
        pushes: tuple[Push, ...] = ()
        opened = False
        for command in decided:
            opened = True
            if isinstance(command, Commit):
                pushes = command.pushes
        if not opened:
            return []
        self._iterations[group] += 1
        share = sum(push.share for push in pushes)
        self._observe(group, share)
        if pushes:
            self._folded[group, self._iterations[group]] = pushes
        self._arrived[group] = None
        whole = Push(
            worker=group,
            iteration=self._iterations[group],
            samples=sum(push.samples for push in pushes),
            units=sum(push.units for push in pushes),
            # One group of all is a barrier, whose short last slice counts as a whole one.
            share=1.0 if len(self._groups) == 1 else share,
            version=min((push.version for push in pushes), default=0),
        )
        if self._next is None and self._since_considered >= _ROUNDS * len(self._began):
            self._next = self._reconsidered()
        return self._from_parent(self._across.on_push(whole, now), now)

    def _observe(self, group: int, share: float) -> None:
        """Note what the members have taken for an iteration, unless the end of a pass has cut it short."""
        took, self._took[group] = self._took[group], {}
        part = share * len(self._began) / len(took) if took else 0.0
        self._most[group] = max(self._most[group], part)
        if part >= _WHOLE * self._most[group]:
            for worker, (seconds, samples) in took.items():
                self._times.observe(worker, seconds, samples)

    def _from_parent(self, decided: Iterable[Command], now: float) -> list[Command]:
        """What the parent has decided about groups, for their members."""
        commands: list[Command] = []
        for command in decided:
            if isinstance(command, Commit):
                pushes = [
                    push for whole in command.pushes for push in self._folded.pop((whole.worker, whole.iteration))
                ]
                pushes.sort(key=_worker)
                commands.append(Commit(tuple(pushes), command.share))
            elif isinstance(command, Release):
                group = command.worker
                if self._next is not None:
                    self._arrived[group] = None
                    continue
                self._arrived.pop(group, None)
                self._latest[group] = command
                self._largest_lead = max(self._largest_lead, command.lead)
                commands += [self._release(worker, command, now) for worker in sorted(self._members[group])]
        return commands

    def _release(self, worker: int, whole: Release, now: float) -> Release:
        """The release of a member of the group that this one is of."""
        held_seconds = now - self._began[worker]
        self._began[worker] = now
        self._held_seconds[worker] += held_seconds
        return Release(worker, whole.lead, whole.bound, held_seconds)

    def _group(self, worker: int) -> int:
        if worker not in self._group_of:
            raise ProtocolError(f"worker {worker} is in no group, and not joined: there are {self._workers} workers")
        return self._group_of[worker]

    def _here(self) -> list[int]:
        """The groups that anybody is in."""
        return [group for group, members in enumerate(self._members) if members]

    # Other groups.

    def _reconsidered(self) -> tuple[Groups, str] | None:
        """Other groups than now and why, where the speeds of all who are here are known and say so."""
        self._since_considered = 0
        seconds = self._times.estimate(self._began, self._workers)
        return None if seconds is None else self._grouping.reform(self._groups, seconds)

    def _reform_once_all_have_arrived(self, now: float) -> list[Command]:
        """Where there are to be other groups, those who are here begin in them as soon as nobody runs."""
        if self._next is None or not all(map(self._arrived.__contains__, self._here())):
            return []
        commands: list[Command] = []
        for group in self._here():
            # A parent may hold back what has been pushed until those have pushed who have only just come.
            commands += self._from_parent(self._across.on_leave(group, now), now)
        (self._groups, reason), self._next = self._next, None
        self._make()
        commands.append(self._tell(reason))
        here = sorted(self._began)
        for worker in here:
            self._inside[self._group_of[worker]].on_join(worker, now)
            self._members[self._group_of[worker]].add(worker)
        for group in self._here():
            commands += self._from_parent(self._across.on_join(group, now), now)
        return commands

    def _tell(self, reason: str) -> Regroup:
        self._told = True
        return Regroup(self._groups, reason)

    # What is known.

    def waited_for(self) -> list[int]:
        if self._next is not None:  # All groups that have arrived wait for those that have not.
            across = [group for group in self._here() if group not in self._arrived] if self._arrived else []
        else:
            across = self._across.waited_for()
        waited = {worker for inside in self._inside for worker in inside.waited_for()}
        waited.update(worker for group in across for worker in self._members[group] if worker not in self._took[group])
        return sorted(waited)

    def statistics(self) -> SyncStatistics:
        return SyncStatistics(
            pushes=dict(self._pushes), held_seconds=dict(self._held_seconds), largest_lead=self._largest_lead
        )

    def state_dict(self) -> State:
        return {
            "groups": [list(group) for group in self._groups],
            "most": list(self._most),
            "times": self._times.state_dict(),
            "across": self._across.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on with the groups and the speeds of the given state; leads begin anew as the workers join."""
        self._groups = tuple(tuple(group) for group in cast("list[list[int]]", state["groups"]))
        self._times.load_state_dict(cast("State", state["times"]))
        self._make()
        self._most = list(cast("list[float]", state["most"]))
        self._across.load_state_dict(cast("State", state["across"]))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """A barrier inside each group, and `across` between the groups, which are formed by `grouping`."""

    grouping: Grouping = field(default_factory=lambda: ByRank(2))
    across: Sync = field(default_factory=Unbounded)

    @property
    def in_step(self) -> bool:
        """A group takes every iteration together."""
        return True

    def policy(self, workers: int) -> SyncPolicy:
        """A new policy for a run of so many workers, none of which has joined.

        Raises:
            ConfigError: So many workers cannot be grouped like this.
        """
        return GroupedPolicy(workers=workers, grouping=self.grouping, across=self.across)


def _worker(push: Push) -> int:
    return push.worker
