"""Decides what a launcher reports and does when workers of its run die, hang, leave or come back.

Three watchers feed it, in any order: shard 0 reports which workers come and go, keepers report how processes ended, and
the system shows which processes are stopped. `look` says what follows from everything known. Times are seconds of any
monotonic clock.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Final, NamedTuple, final

from evenstep.core.ending import Ending, failures_in

_AT_ONCE: Final = -1.0
_LEFT: Final = "left in the middle of an epoch"
_VANISHED: Final = "ended with exit code 0 in the middle of an epoch"
_LEFT_OVER: Final = "left over"
_FRUITLESS: Final = 3
_MOST_WAITS: Final = 5  # Timeouts that a replica waits before those that block it are ended; after six it gives up.


@final
class Why(StrEnum):
    """Reasons for which a worker is no longer at the servers, as in the event log."""

    DONE = "is done"
    ENDED = "has ended"
    SILENT = "was silent for too long"
    HUNG = "kept the others waiting for too long"
    AGAIN = "has started again"
    NEVER_CAME = "never came"


_GAVE_UP: Final = {
    Why.NEVER_CAME: "did not come within",
    Why.SILENT: "was silent for",
    Why.HUNG: "kept the others waiting for",
}


@dataclass(slots=True)
class _Worker:
    came: bool = False  # It has come to `prepare`.
    here: bool = False  # At the servers.
    gave_up: str = ""  # Why the servers gave it up, if they did and it is not back.
    early: str = ""  # How it left too early, until that is reported.
    completed: int | None = None  # The pass after which it left.
    done: bool = False  # It said goodbye.
    over: bool = False  # Its process has ended and is not restarted.
    failed: bool = False
    to_end: bool = False  # Its process is to be ended.
    finished: bool = False  # Its process has ended with exit code 0.
    fruitless: int = 0  # Of its processes, those in a row that failed before they came.


class _Rule(NamedTuple):
    """An action to take once the named condition has held for longer than these seconds."""

    name: str
    seconds: float
    act: Callable[[], None]


@final
@dataclass(slots=True, kw_only=True)
class Supervision:
    """Follows the workers of a run.

    Args:
        workers: Number of workers; 0 if other launchers start some of them.
        kept: Whether keepers report how processes end. If not, the end of a connection counts as the end of a process.
        restarts: The number of times that a worker may be restarted.
        elastic: Whether workers may come and go at any time; they have come once a step of theirs counted.
        together: Whether a failure ends or restarts all workers, as torchrun's agent does without servers.
        silent_seconds: How long a worker may be stopped while another one runs.
        timeout_seconds: How long a worker may keep others waiting in `prepare`.
        grace_seconds: After a worker left its loop early, or went on without another, the others have this long to do
            the same before it is reported.
        settle_seconds: Other failures within this time after the first may turn out to be its cause.
        alone_seconds: How long the last workers may go on, or take to come back, after all others have ended, if their
            timeout is not known.

    Attributes:
        stopped: Why the run cannot begin and all workers are to be ended; None if they are not.
        lost: Why workers that did not fail themselves did not finish, as the rest of a sentence.
    """

    workers: int
    kept: bool = True
    restarts: int = 0
    elastic: bool = False
    together: bool = False
    silent_seconds: float = float("inf")
    timeout_seconds: float = float("inf")
    grace_seconds: float = 3.0
    settle_seconds: float = 1.0
    alone_seconds: float = 60.0
    stopped: str | None = None
    lost: dict[int, str] = field(default_factory=dict)
    _all: dict[int, _Worker] = field(init=False)
    _begun: bool = False
    _limit_seconds: float = field(init=False)
    _told_of_last: bool = False
    _running: Collection[int] = ()
    _halted: Collection[int] = ()
    _behind: dict[int, float] = field(default_factory=dict)
    _waited: float = 0.0
    _failed: dict[int, list[Ending]] = field(default_factory=dict)
    """If all workers are restarted together, the failures by the number of the following restart."""
    _since: dict[str, float] = field(default_factory=dict)
    """The time since which each rule's condition has held."""
    _said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._limit_seconds, self._begun = self.alone_seconds, self.elastic
        self._all = {worker: _Worker() for worker in range(self.workers)}

    # What the watchers report.

    def told(self, event: Mapping[str, Any]) -> None:
        """Shard 0 reports that a worker has come or gone, or that a pass begins."""
        kind, worker = event["event"], event.get("worker", 0)
        if kind == "pass":
            self.begun(event["number"])
        elif kind == "join":
            self.joined(worker, event["limit_seconds"])
        elif kind == "meet":
            self._all[worker].came = True
        else:
            about = {name: event[name] for name in ("number", "seconds", "in_loop", "doing")}
            self.left(worker, Why(event["why"]), **about)

    def joined(self, worker: int, limit_seconds: float) -> None:
        """The worker, which was prepared with this timeout, has joined the servers."""
        before, self._all[worker] = self._all[worker], _Worker(here=True, to_end=self._all[worker].to_end)
        self._begun, self._limit_seconds = True, limit_seconds
        self._since.pop(_LEFT_OVER, None)
        if before.gave_up or before.failed:
            self._say(worker, "is back")

    def begun(self, number: int) -> None:
        """The pass of this number begins, without workers that left after an earlier pass and are not back."""
        for state in self._all.values():
            if state.completed is not None and state.completed < number:
                state.completed, state.early = None, "ended early, between two epochs"

    def left(
        self, worker: int, why: Why, *, number: int = 0, seconds: float = 0.0, in_loop: bool = False, doing: str = ""
    ) -> None:
        """The worker is no longer at the servers, in the pass of this number; `in_loop`: before the end of its epoch.

        It was silent, or kept the others waiting, for so many `seconds`. `doing` is its main thread's last known
        activity, as the rest of a sentence.
        """
        state = self._all[worker]
        state.here, state.done = False, why is Why.DONE
        state.over = state.over or (not self.kept and why in (Why.DONE, Why.ENDED))
        if why in _GAVE_UP:
            did = f" ({doing.replace('has been', 'it has been', 1)})" if doing and why is Why.HUNG else ""
            state.gave_up = f"{_GAVE_UP[why]} {seconds:g} s{did}"
            self._say(worker, state.gave_up + self._then)
        elif why in (Why.DONE, Why.ENDED) and not in_loop:
            state.completed = number
        elif why is not Why.AGAIN:
            state.early = _LEFT if why is Why.DONE else _VANISHED

    def ended(self, ending: Ending) -> None:
        """The worker's process has ended. A normal or requested end is not reported."""
        worker = ending.worker
        state = self._all.setdefault(worker, _Worker())
        state.to_end = False
        state.fruitless = 0 if state.came else state.fruitless + 1
        if ending.asked_to_end:
            state.over = state.over or self.elastic
            return
        state.finished = not ending.failed
        if self.together:
            state.over = not ending.failed
            if ending.failed and ending.restarts < self.restarts:
                self._failed.setdefault(ending.restarts + 1, []).append(ending)
            return
        again = ending.failed and ending.again
        state.over = not again
        state.failed, state.came = state.failed or ending.failed, False
        state.gave_up = "" if self.elastic else state.gave_up
        if again:
            again_of = f"it is started again ({ending.restarts + 1} of {self.restarts})"
            self._said.append(f"{ending.name} {ending.how}; {again_of}")
        elif ending.failed and self._begun:
            self._said.append(f"{ending.name} {ending.how}{self._then}")
        elif ending.failed:
            self._stop(worker, ending.how)

    def processes(
        self,
        *,
        running: Collection[int],
        halted: Collection[int],
        came: Collection[int],
        waiting: Mapping[int, float] = {},
        computing: Mapping[int, float] = {},
    ) -> None:
        """Record which processes run, which of these a signal has stopped, and which workers have come to `prepare`.

        In an elastic run, a step of those that `came` has counted, and each has been waiting for the others, or
        computing a step with them, for so many seconds.
        """
        self._running, self._halted = running, halted
        self._waited = max((waiting[worker] for worker in waiting if worker in running), default=0.0)
        latest = 0.0 if self._waited else min(computing.values(), default=0.0)
        self._behind = {worker: computing[worker] - latest for worker in computing if worker in running}
        for worker, state in self._all.items():
            state.came = state.came or worker in came
            state.over = state.over and worker not in running

    # What follows.

    @property
    def to_end(self) -> set[int]:
        """The workers whose processes are to be ended because they do not react."""
        return {worker for worker, state in self._all.items() if state.to_end}

    @property
    def awaits(self) -> bool:
        """True if a worker that was given up may still come back."""
        return any(state.gave_up and not state.over for state in self._all.values())

    @property
    def _finished(self) -> bool:
        return self.elastic and any(state.finished for state in self._all.values())

    def look(self, now: float, *, last: bool = False) -> list[str]:
        """The sentences to tell the user now; `last`: all workers have ended."""
        rules = [
            *self._early(last=last),
            *self._restarted(last=last),
            *self._left_over(),
            *self._absent(),
            *self._useless(),
            *self._gone_on_without(),
        ]
        self._since = {rule.name: self._since.get(rule.name, now) for rule in rules}
        for rule in rules:
            if now - self._since[rule.name] > rule.seconds:
                rule.act()
        said, self._said = self._said, []
        return said

    def _early(self, *, last: bool) -> Iterator[_Rule]:
        """Rules for workers that left too early, once it is known that their processes did not fail."""
        for worker, state in self._all.items():
            if state.early and not state.failed and (state.done or state.over or not self.kept):
                seconds = self.grace_seconds if state.early == _LEFT and not last else _AT_ONCE
                yield _Rule(f"{worker} left", seconds, partial(self._say_early, worker, state))

    def _say_early(self, worker: int, state: _Worker) -> None:
        early, then = state.early, self._then
        state.early = ""
        if early == _LEFT:
            if not then and any(each.completed is not None for each in self._all.values()):
                then = "; the others finished without it"
            if not then:
                return  # All left early: scripts may train for a number of steps.
        elif early == _VANISHED and self.kept:
            self.lost[worker] = early
        elif early == _VANISHED:  # It may have failed, and then the run ends.
            early, then = "ended in the middle of an epoch", ""
        self._say(worker, early + then)

    def _restarted(self, *, last: bool) -> Iterator[_Rule]:
        """Rules for restarts of all workers, once all that failed together are known."""
        for restart in self._failed:
            seconds = _AT_ONCE if last else self.settle_seconds
            yield _Rule(f"restart {restart}", seconds, partial(self._say_restarted, restart))

    def _say_restarted(self, restart: int) -> None:
        first = failures_in(self._failed.pop(restart))[0]
        worker, how = first.worker, first.how
        done = [worker for worker, state in self._all.items() if state.over]
        if first.missed_another and done:
            worker, how = done[0], "ended with exit code 0 before the others were done"
        for state in self._all.values():
            state.over = False
        self._say(worker, f"{how}; all workers start again ({restart} of {self.restarts})")

    def _left_over(self) -> Iterator[_Rule]:
        """Rules for the last workers: all that are left were given up, or a single worker is left.

        A single one may have much to do, such as an evaluation, or may hang where no other worker waits for it.
        """
        left = [worker for worker in range(self.workers) if not self._all[worker].over]
        given_up = all(self._all[worker].gave_up for worker in left)
        if left and (self._begun or self.together) and (given_up or len(left) == 1 < self.workers):
            yield _Rule(_LEFT_OVER, self._limit_seconds, partial(self._end_given_up if given_up else self._tell, left))

    def _tell(self, left: list[int]) -> None:
        if not self._told_of_last:
            self._told_of_last = True
            self._said.append(f"all others ended {self._limit_seconds:g} s ago; worker {left[0]} still runs")

    def _end_given_up(self, left: list[int]) -> None:
        then = ", and is ended" if self.kept else "; the run is ended"
        for worker in left:
            state = self._all[worker]
            state.over = state.failed = state.to_end = True
            self.lost[worker] = f"{state.gave_up} and did not come back"
            self._say(worker, f"did not come back within {self._limit_seconds:g} s{then}")

    def _absent(self) -> Iterator[_Rule]:
        """Rules for workers that others wait for before the run begins, and for workers stopped at any time."""
        waited_for = not self._begun and not self.stopped and any(state.came for state in self._all.values())
        goes_on = bool(set(self._running) - set(self._halted)) or self._finished
        for worker, state in self._all.items():
            if state.to_end:
                continue
            absent = waited_for and not state.came
            if worker in self._halted and goes_on:
                limit = min(self.silent_seconds, self.timeout_seconds)
                how = f"stood still for {limit:g} s, stopped by a signal such as SIGSTOP: find out who sent it"
                yield _Rule(f"{worker} halted", limit, partial(self._end, worker, how))
            elif absent and worker in self._running:
                how = f"did not come to prepare within {self.timeout_seconds:g} s, and is ended"
                yield _Rule(f"{worker} absent", self.timeout_seconds, partial(self._end, worker, how))
            elif absent and state.over:
                how = "ended with exit code 0 before it called prepare"
                yield _Rule(f"{worker} over", _AT_ONCE, partial(self._stop, worker, how))

    def _useless(self) -> Iterator[_Rule]:
        """Rules for workers of an elastic run that would be alone, or never take a step."""
        for worker, state in self._all.items():
            if not self.elastic or state.to_end or state.came or worker not in self._running:
                continue
            if self._finished:
                how = "came when the others had finished, and is ended"
                yield _Rule(f"{worker} late", _AT_ONCE, partial(self._end, worker, how))
            elif state.fruitless >= _FRUITLESS:
                how = f"failed {_FRUITLESS} times before its first step, and is not started again"
                yield _Rule(f"{worker} fruitless", _AT_ONCE, partial(self._end, worker, how))

    def _gone_on_without(self) -> Iterator[_Rule]:
        """Rules for workers of an elastic run that take no more steps, after the others have waited, and do again.

        Where half of them hang, torchft finds no majority for the others to go on: those are ended before it gives up.
        """
        for worker, seconds in self._behind.items() if self.elastic else ():
            state, late = self._all[worker], seconds > self.timeout_seconds
            if late and not (state.gave_up or state.to_end or worker in self._halted):
                name, how = f"{worker} hangs", f"kept the others waiting for {self.timeout_seconds:g} s"
                yield _Rule(name, self.grace_seconds, partial(self._give_up, worker, how))
            elif state.gave_up and not late:
                yield _Rule(f"{worker} is back", _AT_ONCE, partial(self._take_back, worker))
            elif late and not state.to_end and self._waited > _MOST_WAITS * self.timeout_seconds:
                how = "keeps the others from going on, and is ended"
                yield _Rule(f"{worker} blocks", _AT_ONCE, partial(self._end, worker, how))

    def _give_up(self, worker: int, how: str) -> None:
        self._all[worker].gave_up = how
        self._say(worker, how + self._then)

    def _take_back(self, worker: int) -> None:
        self._all[worker].gave_up = ""
        self._say(worker, "is back")

    def _end(self, worker: int, how: str) -> None:
        self._say(worker, how)
        self._all[worker].to_end = True

    def _stop(self, worker: int, how: str) -> None:
        then = "the others were stopped, since all workers must call prepare"
        self.stopped = self.stopped or f"worker {worker} {how}; {then}"

    def _say(self, worker: int, text: str) -> None:
        self._said.append(f"worker {worker} {text}")

    @property
    def _then(self) -> str:
        return (
            "; the others go on"
            if any((each.here or (self.elastic and each.came)) and not each.over for each in self._all.values())
            else ""
        )
