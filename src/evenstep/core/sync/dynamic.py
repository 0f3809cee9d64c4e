"""A bound that moves between two limits: the fastest may go on where it is expected to wait less later. DSSP."""

from dataclasses import dataclass
from typing import cast, final

from evenstep.core.errors import ConfigError
from evenstep.core.sync.alone import commit_alone
from evenstep.core.sync.base import Command, Push, SyncPolicy, SyncStatistics
from evenstep.core.sync.controller import extra_iterations
from evenstep.core.sync.roster import Roster
from evenstep.core.values import State


@final
class DynamicPolicy:
    """Dynamic stale synchronous parallel (Zhao et al., ICDCS 2019), Algorithm 1; Algorithm 2 is `extra_iterations`.

    A worker is released at lead <= `lower` as under SSP. Beyond that the fastest asks the controller for r* extra
    iterations; while it has some, each push is answered by a release, and it keeps them when it is no longer the
    fastest. With none, it is held until its lead is `lower` again.

    Deviations from Algorithm 1 as printed:

    * r* extra iterations are r* releases. Printed, the release that comes with the grant is not counted, which makes
      r* + 1; Fig. 2 shows r*.
    * After the release that comes with a grant the push is dealt with. Printed, control goes on to the wait.
    * Every push records its worker's interval, without the time held. Printed, only the controller's calls record one,
      for the caller, so that the slowest's is never known. A slowest worker of unknown interval is waited for.
    * The paper does not say which of several slowest workers counts; we take the one that came to its iteration last,
      since it is the one that is waited for.
    * Only r <= `upper` + 1 - lead are considered (and all k), so that nobody is released beyond a lead of `upper`.
      Printed, a worker may ask again and again, and nothing enforces the upper limit that Theorem 2 rests on.

    With `bounded` False the last of these is undone, and a held worker is released whatever its lead when the slowest
    has pushed next, as Fig. 2 draws it (when the last of several slowest has). We infer that the paper's Table I was
    run like this, which the paper does not say: between workers of lastingly unequal speed any policy that bounds the
    lead runs at the slow one's rate.

    An interval outlasts a leave and a checkpoint; extra iterations do not.
    """

    __slots__ = ("_bounded", "_extra", "_interval_seconds", "_lower", "_roster", "_upper")

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
        worker, progress = push.worker, self._roster.progress
        slowest_before = progress.slowest
        self._interval_seconds[worker] = self._roster.push(push, now)
        commands = commit_alone(push)
        lead = progress.lead(worker)
        if extra := self._extra.pop(worker, 0) or self._granted(worker, lead, now):
            left = extra - 1
            if left:
                self._extra[worker] = left
            commands.append(self._roster.release(worker, now, bound=max(self._lower, lead + left)))
        elif lead <= self._lower:
            commands.append(self._roster.release(worker, now, bound=self._lower))
        else:
            self._roster.hold(worker)
        commands += self._release_held(now, slowest_before)
        return commands

    def on_leave(self, worker: int, now: float) -> list[Command]:
        slowest_before = self._roster.progress.slowest
        self._roster.leave(worker)
        self._extra.pop(worker, None)
        return self._release_held(now, slowest_before)

    def waited_for(self) -> list[int]:
        return self._roster.waited_for()

    def statistics(self) -> SyncStatistics:
        return self._roster.statistics()

    def state_dict(self) -> State:
        return {"interval_seconds": [[worker, seconds] for worker, seconds in self._interval_seconds.items()]}

    def load_state_dict(self, state: State) -> None:
        """Go on with the intervals of the given state; leads begin anew as the workers join."""
        self._interval_seconds = dict(cast("list[tuple[int, float]]", state["interval_seconds"]))

    def _granted(self, worker: int, lead: int, now: float) -> int:
        """The extra iterations that the controller grants to a worker that has none, whose push has just arrived."""
        progress = self._roster.progress
        if lead <= self._lower or progress.iterations(worker) < progress.fastest:
            return 0
        slowest = progress.last_of_slowest()
        slowest_interval = self._interval_seconds.get(slowest)
        if slowest_interval is None:
            return 0
        most = self._upper - self._lower
        return extra_iterations(
            interval_seconds=self._interval_seconds[worker],
            slowest_interval_seconds=slowest_interval,
            slowest_due_seconds=self._roster.running_since(slowest) + slowest_interval - now,
            most=most,
            allowed=self._upper + 1 - lead if self._bounded else most,
        )

    def _release_held(self, now: float, slowest_before: int) -> list[Command]:
        progress = self._roster.progress
        commands: list[Command] = [*self._roster.release_up_to(self._lower, now, bound=self._lower)]
        if not self._bounded and progress.slowest > slowest_before:
            commands += self._roster.release_up_to(progress.fastest - progress.slowest, now, bound=None)
        return commands


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamic:
    """DSSP: a worker is released at a lead of `lower` to `upper` iterations, where the controller sees the least wait.

    0 <= `lower` <= `upper`. With `bounded` False nothing bounds the lead, as we infer of the paper's Table I.
    """

    lower: int = 3
    upper: int = 15
    bounded: bool = True

    def __post_init__(self) -> None:
        if self.lower < 0:
            raise ConfigError(f"a worker cannot be bounded to a lead of {self.lower}: use a lower of 0 or more")
        if self.upper < self.lower:
            raise ConfigError(f"leads cannot be from {self.lower} to {self.upper}: use an upper of at least lower")

    @property
    def in_step(self) -> bool:
        """Workers go their own ways."""
        return False

    def policy(self, workers: int) -> SyncPolicy:
        """A new policy for a run of so many workers, none of which has joined."""
        return DynamicPolicy(lower=self.lower, upper=self.upper, bounded=self.bounded)
