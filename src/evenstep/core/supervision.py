"""What to report and do when workers of a run die, hang, leave or come back.

Servers report which workers come and go; keepers, if there are any, report how processes ended. Times are seconds of
any clock that does not go back.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeAlias, final

from evenstep.core.ending import Ending

GRACE_SECONDS: Final = 3.0
"""How long after a worker left its loop early the others may leave theirs, before that worker is reported."""
SETTLE_SECONDS: Final = 1.0
"""How long after a first failure other failures may turn out to be its cause."""
ALONE_SECONDS: Final = 60.0
"""How long a worker may run after all others ended before that is reported, if its timeout is not known."""


@final
class Why(StrEnum):
    """Why a worker is no longer at the servers, as the event log says it."""

    DONE = "is done"
    ENDED = "has ended"
    SILENT = "was silent for too long"
    HUNG = "kept the others waiting for too long"
    AGAIN = "has started again"
    NEVER_CAME = "never came"


@final
@dataclass(frozen=True, slots=True)
class Say:
    """Tell the user this."""

    text: str


@final
@dataclass(frozen=True, slots=True)
class End:
    """End this worker, which does not react."""

    worker: int


@final
@dataclass(frozen=True, slots=True)
class Stop:
    """End the run, which cannot go on, for this reason."""

    why: str


Action: TypeAlias = Say | End | Stop


@dataclass(slots=True)
class _Worker:
    here: bool = False  # At the servers.
    gave_up: str = ""  # Why it was given up, if it was and is not back.
    broke_off: float | None = None  # When it left its loop early with a goodbye, until that is reported.
    completed: bool = False  # It left after the end of an epoch.
    vanished: bool = False  # Its connection ended while it was in its loop.
    done: bool = False  # It said goodbye.
    missed: bool = False  # An epoch began without it, which was not reported yet.
    met: bool = False  # It has come to `prepare`.
    over: bool = False  # Its process has ended and is not restarted.
    failed: bool = False


@final
@dataclass(slots=True, kw_only=True)
class Supervision:
    """Follows the workers of a run on servers.

    Args:
        workers: Number of workers.
        kept: Whether keepers report how processes end. If not, the end of a connection stands for that of a process.
        restarts: How often a keeper restarts a worker.
    """

    workers: int
    kept: bool
    restarts: int = 0
    lost: dict[int, str] = field(default_factory=dict)
    """Why workers did not finish that did not fail themselves, as the rest of a sentence."""
    _all: list[_Worker] = field(init=False)
    _begun: bool = False
    _limit_seconds: float = 0.0
    """How long a worker that was given up may take to come back after all others have ended."""
    _stopped: bool = False
    _left_alone: float | None = None
    """Since when only workers that were given up are left, or a single other one."""
    _reported_last: bool = False

    def __post_init__(self) -> None:
        self._all = [_Worker() for _ in range(self.workers)]

    def told(self, event: Mapping[str, Any], now: float) -> list[Action]:
        """Shard 0 reports that a worker has come or gone."""
        kind, worker = event["event"], event["worker"]
        if kind == "join":
            return self.joined(worker, event["limit_seconds"])
        if kind == "meet":
            return self.met(worker)
        if kind == "missing":
            return self.missing(worker)
        about = {name: event[name] for name in ("seconds", "in_loop", "doing")}
        return self.left(worker, Why(event["why"]), now, **about)

    def met(self, worker: int) -> list[Action]:
        """The worker has come to `prepare`, where all wait for each other."""
        self._all[worker].met = True
        return self._look_for_absent()

    def joined(self, worker: int, limit_seconds: float) -> list[Action]:
        """The worker, prepared with this timeout, has joined the servers."""
        before, self._all[worker] = self._all[worker], _Worker(here=True)
        self._left_alone = None
        self._begun, self._limit_seconds = True, limit_seconds
        return [Say(f"worker {worker} is back")] if before.gave_up or before.failed else []

    def left(
        self, worker: int, why: Why, now: float, *, seconds: float = 0.0, in_loop: bool = False, doing: str = ""
    ) -> list[Action]:
        """The worker is no longer at the servers.

        Args:
            worker: Its rank.
            why: The reason.
            now: Time of the event.
            seconds: How long it was silent or kept the others waiting.
            in_loop: Whether it left before the end of its epoch.
            doing: What its main thread did when it was last heard of, as the rest of a sentence; empty if not known.
        """
        state = self._all[worker]
        state.here, state.done = False, why is Why.DONE
        state.over = state.over or (not self.kept and why in (Why.DONE, Why.ENDED))
        if why in (Why.SILENT, Why.HUNG, Why.NEVER_CAME):
            state.gave_up = _how(why, seconds, doing)
            return [self._say(worker, state.gave_up)]
        if why is Why.DONE:
            state.completed = not in_loop
            state.broke_off = now if in_loop else None
        elif why is Why.ENDED and in_loop:
            state.vanished = True
            return self._look_for_vanished(worker)
        return []

    def missing(self, worker: int) -> list[Action]:
        """The worker left between two epochs, and others have begun the next one."""
        self._all[worker].missed = True
        return self._look_for_missed(worker)

    def ended(self, ending: Ending) -> list[Action]:
        """The worker's process has ended; a normal end is not reported."""
        state, worker = self._all[ending.worker], ending.worker
        again = ending.failed and ending.again
        state.failed, state.over, state.met = state.failed or ending.failed, not again, False
        if not ending.failed:
            return [*self._look_for_vanished(worker), *self._look_for_missed(worker)] or self._look_for_absent()
        state.broke_off = None  # The failure says more.
        if again:
            count = f"{ending.restarts + 1} of {self.restarts}"
            return [Say(f"worker {worker} {ending.how}; it is started again ({count})")]
        if self._stopped:
            return []
        return [self._say(worker, ending.how) if self._begun else self._stop(worker, ending.how)]

    def look(self, now: float, *, last: bool = False) -> list[Action]:
        """Time has passed; `last`: all workers have ended."""
        return [*self._look_for_broken_off(now, last=last), *self._look_for_stuck(now)]

    @property
    def awaits(self) -> bool:
        """Whether a worker that was given up may still come back."""
        return any(state.gave_up and not state.over for state in self._all)

    def _say(self, worker: int, how: str) -> Say:
        return Say(f"worker {worker} {how}{self._then()}")

    def _then(self) -> str:
        return "; the others go on" if any(each.here and not each.over for each in self._all) else ""

    def _stop(self, worker: int, how: str) -> Stop:
        self._stopped = True
        return Stop(f"worker {worker} {how}; the others were stopped, since all workers must call prepare")

    def _look_for_absent(self) -> list[Action]:
        """A normal end before the run began matters only if another worker has come to `prepare`."""
        absent = [worker for worker, state in enumerate(self._all) if state.over and not state.met]
        if self._begun or self._stopped or not absent or not any(state.met for state in self._all):
            return []
        return [self._stop(absent[0], "ended with exit code 0 before it called prepare")]

    def _look_for_vanished(self, worker: int) -> list[Action]:
        """Report a normal end in mid-epoch without a goodbye; the end and the missing goodbye come in any order."""
        state = self._all[worker]
        if not state.vanished or state.failed or (self.kept and not state.over):
            return []
        state.vanished = False
        if not self.kept:  # It may have failed, and then the run ends.
            return [] if self._stopped else [Say(f"worker {worker} ended in the middle of an epoch")]
        self.lost[worker] = "ended with exit code 0 in the middle of an epoch"
        return [self._say(worker, self.lost[worker])]

    def _look_for_missed(self, worker: int) -> list[Action]:
        """Report that an epoch began without the worker, once it is known that its process did not fail."""
        state = self._all[worker]
        if not state.missed or state.failed or (self.kept and not state.done and not state.over):
            return []
        state.missed = False
        return [self._say(worker, "ended early, between two epochs")]

    def _look_for_broken_off(self, now: float, *, last: bool) -> list[Action]:
        """Report workers that left early, unless all did: scripts may train for a number of steps."""
        finished = "; the others finished without it" if any(each.completed for each in self._all) else ""
        actions: list[Action] = []
        for worker, state in enumerate(self._all):
            if state.broke_off is None or not (last or now - state.broke_off > GRACE_SECONDS):
                continue
            state.broke_off = None
            if then := self._then() or finished:
                actions.append(Say(f"worker {worker} left in the middle of an epoch{then}"))
        return actions

    def _look_for_stuck(self, now: float) -> list[Action]:
        left = [worker for worker, state in enumerate(self._all) if not state.over]
        given_up = all(self._all[worker].gave_up for worker in left)
        if not self._begun or not left or not (given_up or len(left) == 1 < self.workers):
            self._left_alone = None
            return []
        if self._left_alone is None:
            self._left_alone = now
        if now - self._left_alone <= self._limit_seconds:
            return []
        if given_up:
            return [action for worker in left for action in self._end(worker)]
        # It may have much to do, such as an evaluation, or may hang where no other worker waits for it.
        if self._reported_last:
            return []
        self._reported_last = True
        return [Say(f"all others ended {self._limit_seconds:g} s ago; worker {left[0]} still runs")]

    def _end(self, worker: int) -> list[Action]:
        state = self._all[worker]
        state.over = state.failed = True
        self.lost[worker] = f"{state.gave_up} and did not come back"
        then = ", and is ended" if self.kept else "; the run is ended"
        return [Say(f"worker {worker} did not come back within {self._limit_seconds:g} s{then}"), End(worker)]


def _how(why: Why, seconds: float, doing: str) -> str:
    """What happened to a worker that is given up, as the rest of a sentence."""
    if why is Why.NEVER_CAME:
        return f"did not come within {seconds:g} s"
    if why is Why.SILENT:
        return f"was silent for {seconds:g} s"
    did = f" ({doing.replace('has been', 'it has been', 1)})" if doing else ""
    return f"kept the others waiting for {seconds:g} s{did}"


@final
class Restarts:
    """Follows workers that torchrun's agent restarts, all at once: reports each restart with the worker that caused it.

    Also reports, once, that one worker still runs a minute after the others ended, because no limit ends it.

    Args:
        restarts: How often the agent restarts the workers.
        workers: Number of workers of the agent; 0 if the run has other workers too.
    """

    def __init__(self, restarts: int, workers: int = 0) -> None:
        self._limit = restarts
        self._workers = workers
        self._failed: dict[int, list[Ending]] = {}
        """By the number of the restart that follows."""
        self._since: dict[int, float] = {}
        self._done: list[Ending] = []
        """Normal ends since the last restart."""
        self._alone_since: float | None = None
        self._reported_last = False

    def ended(self, ending: Ending) -> list[Action]:
        """A worker's process has ended; what follows comes with a later look."""
        if not ending.failed:
            self._done.append(ending)
        elif ending.restarts < self._limit:
            self._failed.setdefault(ending.restarts + 1, []).append(ending)
        return []

    def look(self, now: float, *, last: bool = False) -> list[Action]:
        """What to report once all that failed together are known; `last`: no more will fail."""
        for restart in self._failed:
            self._since.setdefault(restart, now)
        due = [restart for restart, since in self._since.items() if last or now - since > SETTLE_SECONDS]
        return [*map(self._restarted, due), *self._look_for_the_last(now)]

    def _look_for_the_last(self, now: float) -> list[Action]:
        left = set(range(self._workers)) - {ending.worker for ending in self._done}
        if len(left) != 1 or self._workers == 1:
            self._alone_since = None
            return []
        if self._alone_since is None:
            self._alone_since = now
        if self._reported_last or now - self._alone_since <= ALONE_SECONDS:
            return []
        self._reported_last = True
        return [Say(f"all others ended {ALONE_SECONDS:g} s ago; worker {left.pop()} still runs")]

    def _restarted(self, restart: int) -> Say:
        del self._since[restart]
        first = min(self._failed.pop(restart), key=lambda ending: ending.missed_another)
        text = f"worker {first.worker} {first.how}"
        if first.missed_another and self._done:
            text = f"worker {self._done[0].worker} {self._done[0].how} before the others were done"
        self._done.clear()
        return Say(f"{text}; all workers start again ({restart} of {self._limit})")
