"""DSSP: a bound that moves between two limits, so that the fastest worker waits at the lead where it waits least."""

from dataclasses import dataclass
from typing import ClassVar, cast, final

from evenstep.core.errors import ConfigError
from evenstep.core.sync.base import Command, Push, SyncPolicy
from evenstep.core.sync.roster import Roster, commit_alone
from evenstep.core.values import State


@final
class DynamicPolicy(SyncPolicy):
    """Dynamic stale synchronous parallel (Zhao et al., ICDCS 2019), Algorithm 1; Algorithm 2 is `extra_iterations`.

    A worker is released at lead <= `lower`, as under SSP. Beyond that the fastest worker asks the controller for r*
    extra iterations. While it has some, each push is answered by a release, even when it is no longer the fastest.
    Without any it is held until its lead is `lower` again.

    docs/schemes/dssp.md lists the deviations from Algorithm 1 as printed. With `bounded` False the lead is not limited,
    and a held worker is released at any lead after the slowest's next push, as drawn in Fig. 2.

    Intervals outlast a leave and a checkpoint; extra iterations do not.
    """

    def __init__(self, *, lower: int, upper: int, bounded: bool) -> None:
        self._lower = lower
        self._upper = upper
        self._bounded = bounded
        self._roster = Roster()
        self._extra: dict[int, int] = {}
        self._interval_seconds: dict[int, float] = {}

    def on_join(self, worker: int, now: float) -> list[Command]:
        return [self._roster.join(worker, now, bound=self._lower)]

    def on_push(self, push: Push, now: float) -> list[Command]:
        worker, roster = push.worker, self._roster
        slowest_before = roster.slowest
        self._interval_seconds[worker] = roster.push(push, now)
        commands = commit_alone(push)
        lead = roster.lead(worker)
        if extra := self._extra.pop(worker, 0) or self._granted(worker, lead, now):
            left = extra - 1
            if left:
                self._extra[worker] = left
            commands.append(roster.release(worker, now, bound=max(self._lower, lead + left)))
        elif lead <= self._lower:
            commands.append(roster.release(worker, now, bound=self._lower))
        else:
            roster.hold(worker)
        return commands + self._release_held(now, slowest_before)

    def on_leave(self, worker: int, now: float) -> list[Command]:
        slowest_before = self._roster.slowest
        self._roster.leave(worker)
        self._extra.pop(worker, None)
        return self._release_held(now, slowest_before)

    def waited_for(self) -> list[int]:
        return self._roster.waited_for()

    def state_dict(self) -> State:
        return {"interval_seconds": [[worker, seconds] for worker, seconds in self._interval_seconds.items()]}

    def load_state_dict(self, state: State) -> None:
        self._interval_seconds = dict(cast("list[tuple[int, float]]", state["interval_seconds"]))

    def _granted(self, worker: int, lead: int, now: float) -> int:
        """The extra iterations that the controller grants to a worker without any, whose push has just arrived."""
        roster = self._roster
        if lead <= self._lower or lead < roster.fastest - roster.slowest:
            return 0
        slowest = roster.last_of_slowest()
        slowest_interval = self._interval_seconds.get(slowest)
        if slowest_interval is None:
            return 0
        most = self._upper - self._lower
        return extra_iterations(
            interval_seconds=self._interval_seconds[worker],
            slowest_interval_seconds=slowest_interval,
            slowest_due_seconds=roster.running_since(slowest) + slowest_interval - now,
            most=most,
            allowed=self._upper + 1 - lead if self._bounded else most,
        )

    def _release_held(self, now: float, slowest_before: int) -> list[Command]:
        roster = self._roster
        commands: list[Command] = [*roster.release_up_to(self._lower, now, bound=self._lower)]
        if not self._bounded and roster.slowest > slowest_before:
            commands += roster.release_up_to(roster.fastest - roster.slowest, now, bound=None)
        return commands


def extra_iterations(
    *, interval_seconds: float, slowest_interval_seconds: float, slowest_due_seconds: float, most: int, allowed: int
) -> int:
    """The number of further iterations of the fastest worker before it waits: r* of DSSP's Algorithm 2.

    With the present as the origin of time, p the fastest worker and s the slowest:

        Sim_p[r] = r * I_p            when p would push after r extra iterations
        Sim_s[k] = due + k * I_s      when s is expected to push next, and k pushes later
        r* = the r of the pair (k, r) in [0, most]^2 with the least |Sim_s[k] - Sim_p[r]|

    At r* a push of p and one of s are expected closest together, so that p waits least. The difference counts the same
    whichever is later.

    Deviations (docs/schemes/dssp.md): the smallest r wins a tie, an interval is from release to push, and r is at most
    `allowed`. Only the k on either side of Sim_p[r] are tried, which does not change the result.

    Args:
        interval_seconds: I_p, from p's last release to its push, which is now; 0 or more.
        slowest_interval_seconds: I_s, the same for s, as last measured; 0 or more.
        slowest_due_seconds: time from now to s's next push; negative where it is overdue.
        most: the paper's r_max, the largest k and r; 0 or more.
        allowed: the largest r that may be granted now; 0 or more.

    >>> extra_iterations(
    ...     interval_seconds=1.0, slowest_interval_seconds=4.0, slowest_due_seconds=3.0, most=4, allowed=4
    ... )
    3
    """

    def apart(extra: int) -> float:
        after_due = extra * interval_seconds - slowest_due_seconds
        if not slowest_interval_seconds:
            return abs(after_due)
        earlier = int(min(max(after_due / slowest_interval_seconds, 0.0), float(most)))
        return min(abs(after_due - k * slowest_interval_seconds) for k in (earlier, min(earlier + 1, most)))

    return min(range(min(most, allowed) + 1), key=apart)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamic:
    """DSSP: a worker is released at a lead of `lower` to `upper` iterations, where the least wait is predicted.

    0 <= `lower` <= `upper`. With `bounded` False nothing bounds the lead, as we infer from the paper's Table I.
    """

    in_step: ClassVar = False

    lower: int = 3
    upper: int = 15
    bounded: bool = True

    def __post_init__(self) -> None:
        if self.lower < 0:
            raise ConfigError(f"a worker cannot be bounded to a lead of {self.lower}: use a lower of 0 or more")
        if self.upper < self.lower:
            raise ConfigError(f"leads cannot be from {self.lower} to {self.upper}: use an upper of at least lower")

    def policy(self, workers: int) -> SyncPolicy:
        return DynamicPolicy(lower=self.lower, upper=self.upper, bounded=self.bounded)
