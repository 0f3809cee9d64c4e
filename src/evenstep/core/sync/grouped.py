"""Grouped servers: a barrier inside each group, and between groups any other policy, which sees groups as workers."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar, cast, final

from evenstep.core.errors import ProtocolError
from evenstep.core.groups import ByRank, Grouping, Groups, IterationTimes, Regroup
from evenstep.core.sync.barrier import BarrierPolicy
from evenstep.core.sync.base import Command, Commit, Push, Release, Sync, SyncPolicy
from evenstep.core.sync.bounded import Unbounded
from evenstep.core.values import State


@dataclass(slots=True)
class _Group:
    """The workers of one group that have joined.

    Attributes:
        pushed: seconds and samples of the members that have pushed in the current iteration.
        arrived: the group has pushed or just joined, and its parent has not released it yet.
        most: the largest part of the global batch taken in an iteration, relative to the number of members.
        folded: the members' pushes of which each push of the group to its parent consists, by iteration.
        latest: the parent's last release of the group.
    """

    barrier: BarrierPolicy = field(default_factory=BarrierPolicy)
    members: set[int] = field(default_factory=set)
    pushed: dict[int, tuple[float, int]] = field(default_factory=dict)
    arrived: bool = False
    iterations: int = 0
    most: float = 0.0
    folded: dict[int, tuple[Push, ...]] = field(default_factory=dict)
    latest: Release | None = None


@final
class GroupedPolicy(SyncPolicy):
    """Grouped parameter servers (Basu et al., HiPC 2018): a barrier in each group, the `across` policy between groups.

    The pushes of a group are one push to the parent, the mean of its members weighted by units. When the parent
    releases the group, all its members are released on the same weights. One group of all workers is a barrier, and
    groups of one worker each are the parent's policy.

    The paper does not say how workers are assigned, nor when that changes: `grouping` decides. If no worker is in a
    pass, new groups are formed at once. Otherwise they are formed by one barrier across all groups, each of which is
    held until all have arrived, and leads restart from 0.

    A worker that joins takes part in its group's current iteration. A release's lead and bound are its group's.

    Groups are reconsidered after `patience` pushes per worker. An iteration with less than the fraction `whole` of its
    group's largest part was cut short by the end of its pass, and its times do not count.
    """

    def __init__(
        self, *, workers: int, grouping: Grouping, across: Sync, patience: int = 5, whole: float = 0.9
    ) -> None:
        self._patience, self._whole = patience, whole
        self._workers = workers
        self._grouping = grouping
        self._across_part = across
        self._told = False  # Whether a Regroup was issued.
        self._next: Regroup | None = None  # Formed once all groups have arrived.
        self._since: dict[int, float] = {}  # Time of each joined worker's last release, or of its join or push.
        self._times = IterationTimes()
        self._unconsidered = 0  # Pushes since groups were last reconsidered.
        self._make(grouping.form(workers))

    def _make(self, groups: Groups) -> None:
        """Start new policies for these groups, without members."""
        self._ranks = groups
        self._groups = [_Group() for _ in groups]
        self._group_of = {worker: number for number, ranks in enumerate(groups) for worker in ranks}
        self._across = self._across_part.policy(len(groups))

    def _form(self, regroup: Regroup) -> Command:
        self._make(regroup.groups)
        self._told = True
        return regroup

    # Events.

    def on_join(self, worker: int, now: float) -> list[Command]:
        commands: list[Command] = []
        if not self._since and (regroup := self._reconsider()) is not None:
            commands.append(self._form(regroup))
        if not self._told:
            self._told = True
            commands.append(Regroup(self._ranks, "as the run begins"))
        number = self._number(worker)
        group = self._groups[number]
        group.barrier.on_join(worker, now)
        self._since[worker] = now
        group.members.add(worker)
        if len(group.members) == 1:
            # If new groups are about to be formed, the parent's release waits for that.
            commands += self._from_parent(self._across.on_join(number, now), now)
        elif not group.arrived and group.latest is not None:
            commands.append(self._release(worker, group.latest, now))
        return commands + self._reform_if_all_arrived(now)

    def on_push(self, push: Push, now: float) -> list[Command]:
        worker = push.worker
        number = self._number(worker)
        group = self._groups[number]
        if group.arrived:
            raise ProtocolError(
                f"worker {worker} pushed its iteration {push.iteration} while its group is held:"
                " only a worker that has joined and was released since its last push may push"
            )
        decided = group.barrier.on_push(push, now)  # Before any change, because it may refuse the push.
        group.pushed[worker] = now - self._since[worker], push.samples
        self._since[worker] = now
        self._unconsidered += 1
        return self._from_inside(number, decided, now) + self._reform_if_all_arrived(now)

    def on_leave(self, worker: int, now: float) -> list[Command]:
        number = self._number(worker)
        group = self._groups[number]
        decided = group.barrier.on_leave(worker, now)
        del self._since[worker]
        group.members.discard(worker)
        commands = self._from_inside(number, decided, now)
        if not group.members:
            group.arrived = False
            commands += self._from_parent(self._across.on_leave(number, now), now)
        return commands + self._reform_if_all_arrived(now)

    # Between the group and its parent.

    def _from_inside(self, number: int, decided: list[Command], now: float) -> list[Command]:
        """If the group's barrier has opened, make its pushes one push to the parent."""
        if not decided:
            return []
        group = self._groups[number]
        pushes = next((command.pushes for command in decided if isinstance(command, Commit)), ())
        share = sum(push.share for push in pushes)
        self._observe(group, share)
        group.iterations += 1
        group.arrived = True
        if pushes:
            group.folded[group.iterations] = pushes
        whole = Push(
            worker=number,
            iteration=group.iterations,
            samples=sum(push.samples for push in pushes),
            units=sum(push.units for push in pushes),
            # One group of all workers is a barrier, where a short last slice counts as a whole one.
            share=1.0 if len(self._groups) == 1 else share,
            version=min((push.version for push in pushes), default=0),
        )
        if self._next is None and self._unconsidered >= self._patience * len(self._since):
            self._next = self._reconsider()
        return self._from_parent(self._across.on_push(whole, now), now)

    def _observe(self, group: _Group, share: float) -> None:
        """Record the members' times of an iteration, unless the end of a pass has cut it short."""
        pushed, group.pushed = group.pushed, {}
        part = share * len(self._since) / len(pushed) if pushed else 0.0
        group.most = max(group.most, part)
        if part >= self._whole * group.most:
            for worker, (seconds, samples) in pushed.items():
                self._times.observe(worker, seconds, samples)

    def _from_parent(self, decided: Iterable[Command], now: float) -> list[Command]:
        """Translate the parent's commands about groups into commands about their members."""
        commands: list[Command] = []
        for command in decided:
            if isinstance(command, Commit):
                pushes = [
                    push for each in command.pushes for push in self._groups[each.worker].folded.pop(each.iteration)
                ]
                commands.append(Commit(tuple(sorted(pushes, key=attrgetter("worker"))), command.share))
            elif isinstance(command, Release):
                group = self._groups[command.worker]
                group.arrived = self._next is not None
                if not group.arrived:
                    group.latest = command
                    commands += [self._release(worker, command, now) for worker in sorted(group.members)]
        return commands

    def _release(self, worker: int, whole: Release, now: float) -> Release:
        """The release of one member of the group that `whole` releases."""
        held_seconds = now - self._since[worker]
        self._since[worker] = now
        return Release(worker, whole.lead, whole.bound, held_seconds)

    def _number(self, worker: int) -> int:
        if worker not in self._group_of:
            raise ProtocolError(f"worker {worker} is in no group, and not joined: there are {self._workers} workers")
        return self._group_of[worker]

    def _joined(self) -> dict[int, _Group]:
        """The groups with members, by number."""
        return {number: group for number, group in enumerate(self._groups) if group.members}

    # New groups.

    def _reconsider(self) -> Regroup | None:
        """New groups, if the speeds of all joined workers are known and justify them."""
        self._unconsidered = 0
        seconds = self._times.estimate(self._since, self._workers)
        return None if seconds is None else self._grouping.reform(self._ranks, seconds)

    def _reform_if_all_arrived(self, now: float) -> list[Command]:
        """Form the next groups, if there are any and no worker runs; the joined workers start in them."""
        if self._next is None or not all(group.arrived for group in self._joined().values()):
            return []
        commands: list[Command] = []
        for number in self._joined():
            # A parent may hold back pushes until groups that have just joined have pushed.
            commands += self._from_parent(self._across.on_leave(number, now), now)
        commands.append(self._form(self._next))
        self._next = None
        for worker in sorted(self._since):
            group = self._groups[self._group_of[worker]]
            group.barrier.on_join(worker, now)
            group.members.add(worker)
        for number in self._joined():
            commands += self._from_parent(self._across.on_join(number, now), now)
        return commands

    # State.

    def waited_for(self) -> list[int]:
        joined = self._joined()
        if self._next is None:
            across = self._across.waited_for()
        else:  # All groups that have arrived wait for those that have not.
            across = [number for number, group in joined.items() if not group.arrived]
            across = across if len(across) < len(joined) else []
        waited = {worker for group in joined.values() for worker in group.barrier.waited_for()}
        for number in across:
            waited |= self._groups[number].members - self._groups[number].pushed.keys()
        return sorted(waited)

    def state_dict(self) -> State:
        return {
            "groups": [list(ranks) for ranks in self._ranks],
            "most": [group.most for group in self._groups],
            "times": self._times.state_dict(),
            "across": self._across.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        self._make(tuple(tuple(ranks) for ranks in cast("list[list[int]]", state["groups"])))
        for group, most in zip(self._groups, cast("list[float]", state["most"]), strict=True):
            group.most = most
        self._times.load_state_dict(cast("State", state["times"]))
        self._across.load_state_dict(cast("State", state["across"]))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Grouped:
    """A barrier inside each group, and `across` between the groups, which are formed by `grouping`."""

    in_step: ClassVar = True

    grouping: Grouping = field(default_factory=lambda: ByRank(2))
    across: Sync = field(default_factory=Unbounded)

    def policy(self, workers: int) -> SyncPolicy:
        """A new policy; ConfigError if this many workers cannot be grouped like this."""
        return GroupedPolicy(workers=workers, grouping=self.grouping, across=self.across)
