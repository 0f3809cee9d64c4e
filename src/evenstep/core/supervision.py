"""What is said and done when workers of a run on servers die, hang, leave or come back.

It is told by the servers which workers come and go, and by the workers' keepers, where there are any, how processes
ended. Times are seconds of any clock that does not go back.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias, final

GRACE_SECONDS: Final = 3.0
"""How long the others have to leave their loops too, before a worker that left its own counts as one that broke off."""


SETTLE_SECONDS: Final = 1.0
"""How long after the first worker that failed others may fail that were its cause."""
ALONE_SECONDS: Final = 60.0
"""How long a worker may run after all others have ended until that is said, where its timeout is not known."""


@final
class Why(StrEnum):
    """Why a worker is not at the servers any more, as the event log has it."""

    DONE = "is done"
    ENDED = "has ended"
    SILENT = "was silent for too long"
    HUNG = "kept the others waiting for too long"
    AGAIN = "has started anew"
    NEVER_CAME = "never came"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """A worker is not at the servers any more.

    Attributes:
        seconds: How long it was silent or kept others waiting.
        in_loop: It left before the end of its epoch.
        doing: What its main thread did when it was last heard of, as the rest of a sentence; empty if not known.
    """

    worker: int
    why: Why
    seconds: float = 0.0
    in_loop: bool = False
    doing: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A worker's process has ended.

    Attributes:
        how: The rest of a sentence that begins with the worker, such as `was killed by SIGKILL`.
        failed: It ended by a signal or with another exit code than 0.
        restart: Which restart follows, from 1; 0: it is not started again.
        missed_another: It only ended because another worker had.
    """

    worker: int
    how: str
    failed: bool
    restart: int = 0
    missed_another: bool = False


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
    """End the run, which cannot get on, for this reason."""

    why: str


Action: TypeAlias = Say | End | Stop


@dataclass(slots=True)
class _Worker:
    """here: it is at the servers. gave_up: how, once it was given up and is not back. over: its process has ended."""

    here: bool = False
    gave_up: str = ""
    broke_off: float | None = None
    """When it left its loop early and said goodbye, if nothing was said of that yet."""
    completed: bool = False
    """Whether it left after the end of an epoch."""
    vanished: bool = False
    """Whether it was in its loop when its connection ended."""
    done: bool = False
    """Whether it said goodbye."""
    missed: bool = False
    """Whether an epoch began without it, if nothing was said of that yet."""
    met: bool = False
    """Whether it waits in `prepare` for the others, or did."""
    over: bool = False
    failed: bool = False


@final
@dataclass(slots=True, kw_only=True)
class Supervision:
    """Follows the workers of one run.

    Args:
        workers: How many there are.
        kept: Keepers report how processes end.
        restarts: How often a keeper starts a worker again.
    """

    workers: int
    kept: bool
    restarts: int = 0
    lost: dict[int, str] = field(default_factory=dict)
    """Why these workers did not finish, as the rest of a sentence; of those that did not fail by themselves."""
    _all: list[_Worker] = field(init=False)
    _begun: bool = False
    _limit_seconds: float = 0.0
    """How long a worker that was given up may take to come back once all others have ended."""
    _stopped: bool = False
    _left_alone: float | None = None
    """Since when only workers that were given up are left, or a single other one."""
    _said_of_the_last: bool = False

    def __post_init__(self) -> None:
        self._all = [_Worker() for _ in range(self.workers)]

    def met(self, worker: int) -> list[Action]:
        """The worker has come to `prepare`, where all wait for each other."""
        self._all[worker].met = True
        return self._look_for_absent()

    def joined(self, worker: int, limit_seconds: float) -> list[Action]:
        """The worker has taken its place at the servers; it was prepared with this timeout."""
        state = self._all[worker]
        back = bool(state.gave_up) or state.failed
        self._all[worker] = _Worker(here=True)
        self._left_alone = None
        self._begun, self._limit_seconds = True, limit_seconds
        return [Say(f"worker {worker} is back")] if back else []

    def left(self, leave: Leave, now: float) -> list[Action]:
        """The worker is not at the servers any more."""
        state = self._all[leave.worker]
        state.here, state.done = False, leave.why is Why.DONE
        # Without keepers there is no other sign of the end of a process.
        state.over = state.over or (not self.kept and leave.why in (Why.DONE, Why.ENDED))
        if leave.why in (Why.SILENT, Why.HUNG, Why.NEVER_CAME):
            state.gave_up = _how(leave)
            return [Say(f"worker {leave.worker} {state.gave_up}{self._then()}")]
        if leave.why is Why.DONE:
            state.completed = not leave.in_loop
            state.broke_off = now if leave.in_loop else None
        elif leave.why is Why.ENDED and leave.in_loop:
            state.vanished = True
            return self._vanished(leave.worker)
        return []

    def missing(self, worker: int) -> list[Action]:
        """The worker has left between two epochs, and others have begun the next one."""
        self._all[worker].missed = True
        return self._missed(worker)

    def ended(self, ending: Ending) -> list[Action]:
        """The worker's process has ended; nothing is said of one that ended well."""
        state, worker = self._all[ending.worker], ending.worker
        state.failed = state.failed or ending.failed
        state.over = not ending.restart
        state.met = False
        if not ending.failed:
            return [*self._vanished(worker), *self._missed(worker)] or self._look_for_absent()
        state.broke_off = None  # That it failed says more.
        if ending.restart:
            return [Say(f"worker {worker} {ending.how}; it is started again ({ending.restart} of {self.restarts})")]
        if not self._begun and not self._stopped:
            return [self._stop(worker, ending.how)]
        return [] if self._stopped else [Say(f"worker {worker} {ending.how}{self._then()}")]

    def look(self, now: float, *, last: bool = False) -> list[Action]:
        """Time has passed; `last`: all workers have ended."""
        return [*self._look_for_broken_off(now, last=last), *self._look_for_stuck(now)]

    @property
    def awaits(self) -> bool:
        """Whether a worker that was given up may still come back."""
        return any(state.gave_up and not state.over for state in self._all)

    # In between.

    def _stop(self, worker: int, how: str) -> Stop:
        self._stopped = True
        return Stop(f"worker {worker} {how}; the others were stopped, since all workers must call prepare")

    def _look_for_absent(self) -> list[Action]:
        """A worker that ended well before the run began is missed only where another has come to `prepare`."""
        absent = [worker for worker, state in enumerate(self._all) if state.over and not state.met]
        if self._begun or self._stopped or not absent or not any(state.met for state in self._all):
            return []
        return [self._stop(absent[0], "ended with exit code 0 before it called prepare")]

    def _then(self) -> str:
        return "; the others go on" if any(self._goes_on(each) for each in self._all) else ""

    @staticmethod
    def _goes_on(state: _Worker) -> bool:
        return state.here and not state.over

    def _vanished(self, worker: int) -> list[Action]:
        """Its process ended well, and yet without a goodbye, in mid-epoch: the two are heard of in any order."""
        state = self._all[worker]
        if not state.vanished or state.failed or (self.kept and not state.over):
            return []
        state.vanished = False
        # Without keepers it may have failed, and then the run ends.
        if not self.kept:
            return [] if self._stopped else [Say(f"worker {worker} ended in the middle of an epoch")]
        self.lost[worker] = "ended with exit code 0 in the middle of an epoch"
        return [Say(f"worker {worker} {self.lost[worker]}{self._then()}")]

    def _missed(self, worker: int) -> list[Action]:
        """An epoch began without it: without a goodbye its process may have failed, which is heard of in any order."""
        state = self._all[worker]
        if not state.missed or state.failed or (self.kept and not state.done and not state.over):
            return []
        state.missed = False
        return [Say(f"worker {worker} ended early, between two epochs{self._then()}")]

    def _look_for_broken_off(self, now: float, *, last: bool) -> list[Action]:
        """Nothing is said where all have broken off, as scripts do that train for some number of steps."""
        actions: list[Action] = []
        for worker, state in enumerate(self._all):
            if state.broke_off is None or not (last or now - state.broke_off > GRACE_SECONDS):
                continue
            state.broke_off = None
            finished = any(each.completed for each in self._all)
            if then := self._then() or ("; the others finished without it" if finished else ""):
                actions.append(Say(f"worker {worker} left in the middle of an epoch{then}"))
        return actions

    def _look_for_stuck(self, now: float) -> list[Action]:
        left = [(worker, state) for worker, state in enumerate(self._all) if not state.over]
        given_up = all(state.gave_up for _, state in left)
        if not self._begun or not left or not (given_up or len(left) == 1 < self.workers):
            self._left_alone = None
            return []
        if self._left_alone is None:
            self._left_alone = now
        if now - self._left_alone <= self._limit_seconds:
            return []
        return self._end(left) if given_up else self._say_of_the_last(left[0][0])

    def _say_of_the_last(self, worker: int) -> list[Action]:
        """It may have much to do, such as an evaluation, and may also hang where no other worker waits for it."""
        if self._said_of_the_last:
            return []
        self._said_of_the_last = True
        return [Say(f"all others ended {self._limit_seconds:g} s ago; worker {worker} still runs")]

    def _end(self, left: list[tuple[int, _Worker]]) -> list[Action]:
        actions: list[Action] = []
        for worker, state in left:
            state.over = state.failed = True
            self.lost[worker] = f"{state.gave_up} and did not come back"
            then = ", and is ended" if self.kept else "; the run is ended"
            text = f"worker {worker} did not come back within {self._limit_seconds:g} s{then}"
            actions += [Say(text), End(worker)]
        return actions


@final
class Restarts:
    """Says why torchrun's agent starts all workers again: once for each time, and of the worker that was the cause.

    Also says, once, that one worker still runs a minute after the others have ended, because no limit ends it.

    Args:
        restarts: How often the agent does so.
        workers: How many workers the agent has; 0 where the run has other workers, too.
    """

    def __init__(self, restarts: int, workers: int = 0) -> None:
        self._restarts = restarts
        self._workers = workers
        self._last_end: float | None = None
        self._endings: dict[int, list[Ending]] = {}
        self._since: dict[int, float] = {}
        self._done: list[Ending] = []
        """Those that ended well since the last restart."""

    def ended(self, ending: Ending, now: float) -> None:
        """A worker's process has ended."""
        if not ending.failed:
            self._done.append(ending)
            self._last_end = now
        elif ending.restart:
            self._endings.setdefault(ending.restart, []).append(ending)
            self._since.setdefault(ending.restart, now)

    def look(self, now: float, *, last: bool = False) -> list[Say]:
        """What there is to say, once all who failed together are known; `last`: no more will come."""
        due = [restart for restart, since in self._since.items() if last or now - since > SETTLE_SECONDS]
        for restart in due:
            del self._since[restart]
        return [*(self._say(restart, self._endings.pop(restart)) for restart in due), *self._look_for_the_last(now)]

    def _look_for_the_last(self, now: float) -> list[Say]:
        left = set(range(self._workers)) - {ending.worker for ending in self._done}
        if self._last_end is None or len(left) != 1 or now - self._last_end <= ALONE_SECONDS:
            return []
        self._last_end = None
        return [Say(f"all others ended {ALONE_SECONDS:g} s ago; worker {left.pop()} still runs")]

    def _say(self, restart: int, endings: list[Ending]) -> Say:
        first = min(endings, key=lambda ending: ending.missed_another)
        text = f"worker {first.worker} {first.how}"
        if first.missed_another and self._done:
            text = f"worker {self._done[0].worker} {self._done[0].how} before the others were done"
        self._done.clear()
        return Say(f"{text}; all workers start again ({restart} of {self._restarts})")


def _how(leave: Leave) -> str:
    """What happened to a worker that is given up, as the rest of a sentence."""
    if leave.why is Why.NEVER_CAME:
        return f"did not come within {leave.seconds:g} s"
    if leave.why is Why.SILENT:
        return f"was silent for {leave.seconds:g} s"
    doing = f" ({leave.doing.replace('has been', 'it has been', 1)})" if leave.doing else ""
    return f"kept the others waiting for {leave.seconds:g} s{doing}"
