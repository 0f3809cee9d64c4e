"""Finds the workers that this one waits for in vain, before a collective's own timeout or after its failure.

A stopped process is known for certain, but only on the same machine. A worker that is merely silent may hold Python's
global lock, so it is not lost while another worker on its machine is heard. It is assumed to do what it did.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Final, final

from evenstep.core.activity import WAITS, Doing, Pulse, Seen, behind, next_iteration
from evenstep.core.disagreement import TOGETHER, WEIGHED, disagreement
from evenstep.core.workers import name_workers

_STANDS_SECONDS: Final = 1.2
"""How long a main thread must do one thing before this worker looks at the others: three pulses, far below limits."""

_NEEDS_ALL: Final = WAITS | {Doing.PREPARING, Doing.COMPUTING}
"""Activities that do not end without the other workers; FSDP's models wait for them while they compute."""
_ALIKE: Final = frozenset({Doing.FETCHING, Doing.COMPUTING, Doing.CHECKPOINTING})
"""Activities that take about as long each time. Between iterations a script may do anything, such as evaluate."""


@final
@dataclass(eq=False)
class Lookout:
    """One worker's view of the other workers' signs of life over time.

    Args:
        rank: This worker's rank.
        machines: The machine of each worker, by rank. Workers on the same one see each other's processes.
        silent_seconds: How long a worker may show no sign of life while this one waits.
        timeout_seconds: How long a living worker may keep others waiting; half of it if that is more than
            `times_longest` times the longest that the same activity has ever taken.
        times_longest: See `timeout_seconds`; nvidia-resiliency-ext has the same factor.
        sure_beats: This many pulses of all others without any change show that nobody will go on.
    """

    rank: int
    machines: Sequence[str]
    _: KW_ONLY
    silent_seconds: float
    timeout_seconds: float
    times_longest: int = 5
    sure_beats: int = 10

    def __post_init__(self) -> None:
        self._others = [worker for worker in range(len(self.machines)) if worker != self.rank]
        self._signs: dict[int, float] = {}
        """The last sign of life of each other worker; empty unless this one waits."""
        self._pulses: dict[int, tuple[Pulse, float]] = {}
        """The last pulse of each worker, and the time when it was new."""
        self._longest: dict[Doing, float] = {}
        self._looked = self._since = 0.0
        self._picture: list[tuple[int, Doing, int]] = []
        """The activities and iterations of all workers since the others had beaten `_beats_before` times."""
        self._beats_before: dict[int, int] = {}

    def look(
        self, own: Seen, now: float, *, stopped: Collection[int], pulses: Mapping[int, Pulse] | None
    ) -> str | None:
        """Return a sentence about the workers that this one waits for in vain; None if there are none.

        `stopped` are the workers on this machine whose processes are stopped, `pulses` those of the other workers, or
        None if there are no new ones. `now` is the time of any monotonic clock, in seconds.
        """
        if not needs_all(own):
            self._learn(self._others_seen(now).values())
            self._signs.clear()
            self._pulses.clear()
            return None
        if not self._signs:
            self._begin(now - min(own.seconds, self.silent_seconds / 2))
        elif now - self._looked > self.silent_seconds / 2:  # This process itself stood still, perhaps with the others.
            self._begin(now)
        self._looked = now
        beating = self._others if pulses is None else self._beating(pulses, now)
        heard = {self.machines[worker] for worker in beating}
        for worker in self._others:
            here = self.machines[worker] == self.machines[self.rank]
            if worker not in stopped if here else self.machines[worker] in heard:
                self._signs[worker] = now
        return self._lost(own, now, stopped) or self._late(own, now) or self._apart(own)

    def _begin(self, since: float) -> None:
        """Assume that this worker waits since then, and that all others showed a sign of life then."""
        self._since, self._signs = since, dict.fromkeys(self._others, since)

    def _beating(self, pulses: Mapping[int, Pulse], now: float) -> list[int]:
        """The workers whose pulse has beaten since the last look."""
        seen, beating = self._others_seen(now), []
        for worker, pulse in pulses.items():
            known = self._pulses.get(worker)
            if known is not None and pulse.beats == known[0].beats:
                continue
            if known is not None:
                beating.append(worker)
                if known[0].seen.iteration != pulse.seen.iteration or known[0].seen.doing is not pulse.seen.doing:
                    self._learn([seen[worker]])
            self._pulses[worker] = pulse, now
        return beating

    def _learn(self, done: Iterable[Seen]) -> None:
        """Learn from these finished activities how long each kind takes."""
        for each in done:
            self._longest[each.doing] = max(each.seconds, self._longest.get(each.doing, 0.0))

    def _lost(self, own: Seen, now: float, stopped: Collection[int]) -> str | None:
        lost = [worker for worker, at in self._signs.items() if now - at > self.silent_seconds]
        if here := [worker for worker in lost if worker in stopped]:
            return (
                f"{name_workers(here)} stood still for {self.silent_seconds:g} s, stopped by a signal such as SIGSTOP:"
                " find out who sent it, then start again"
            )
        alive = [seen for worker, seen in self._others_seen(now).items() if worker not in lost]
        if lost and all(each.doing in WAITS for each in [own, *alive]):
            return (
                f"{name_workers(lost)} did not answer for {self.silent_seconds:g} s, nor did any other process of the"
                " run on that machine: look at its output and at the network, then start again"
            )
        return None

    def _late(self, own: Seen, now: float) -> str | None:
        """A sentence about living workers that keep all others waiting for longer than the limit."""
        everyone = {self.rank: own, **self._others_seen(now)}
        seen = dict(everyone)
        late = {worker: seen.pop(worker) for worker in behind(seen)}
        if not late or any(each.doing not in WAITS for each in seen.values()):
            return None
        stuck = all(min(now - self._since, each.seconds) > self._limit_seconds(each) for each in late.values())
        return _left_alone(everyone) or _kept_waiting(late) if stuck else None

    def after_failure(self, own: Seen, before: Mapping[int, Pulse], after: Mapping[int, Pulse]) -> str:
        """A sentence about the worker because of which a collective has failed.

        Takes the other workers' pulses `before`, and the same a few beats later.
        """
        silent = sorted(worker for worker, pulse in after.items() if pulse.beats == before[worker].beats)
        if silent:
            return (
                f"{name_workers(silent)} ended, died, stopped or did not answer within {self.timeout_seconds:g} s:"
                " look at its output, then start again"
            )
        seen = {self.rank: own, **{worker: pulse.seen for worker, pulse in after.items()}}
        if alone := _left_alone(seen):
            return alone
        waited_for = behind(seen, least_seconds=self.timeout_seconds / 4)
        if others := [worker for worker in waited_for if worker != self.rank]:
            return _kept_waiting({worker: seen[worker] for worker in others})
        return (
            "a collective failed although every worker is alive: some worker left the training loop earlier than the"
            " others, ran fewer backwards in an iteration, or called alone what all must call (mean_over_workers,"
            " checkpoint.save), or its network failed; give all the same iterations, backwards and calls"
        )

    def _apart(self, own: Seen) -> str | None:
        """A sentence about workers that wait for something else than the others, in the same iteration.

        All wait for ever: their activities stay the same while their processes go on.
        """
        does = {self.rank: own} | {worker: pulse.seen for worker, (pulse, _) in self._pulses.items()}
        beats = {worker: pulse.beats for worker, (pulse, _) in self._pulses.items()}
        picture = [(worker, each.doing, each.iteration) for worker, each in sorted(does.items())]
        if picture != self._picture:
            self._picture, self._beats_before = picture, beats
        waits = all(each.doing in WAITS and each.iteration == own.iteration for each in does.values())
        since = [beats.get(each, 0) - self._beats_before.get(each, 0) for each in self._others]
        if not waits or min(since) < self.sure_beats:
            return None
        hear = [worker for worker, doing, _ in picture if doing is Doing.HEARING]
        if 0 < len(hear) < len(picture):
            return (
                f"{name_workers(hear)} {'wait' if len(hear) > 1 else 'waits'} to hear what data the others have, which"
                f" wait for something else: {TOGETHER}"
            )
        return disagreement(WEIGHED, ["units" if doing is Doing.COUNTING else "samples" for _, doing, _ in picture])

    def _limit_seconds(self, seen: Seen) -> float:
        """The time limit of this activity. A possible evaluation or first compilation has the whole timeout."""
        if next_iteration(seen.doing, seen.iteration) < 1 or seen.doing not in _ALIKE:
            return self.timeout_seconds
        first = self.timeout_seconds if seen.doing is Doing.CHECKPOINTING else 0.0
        longest = self.times_longest * self._longest.get(seen.doing, first)
        return min(max(longest, self.timeout_seconds / 2), self.timeout_seconds)

    def _others_seen(self, now: float) -> dict[int, Seen]:
        """The others' activities; the main thread of a silent worker is assumed to go on with the same."""
        return {
            worker: replace(pulse.seen, seconds=pulse.seen.seconds + now - at)
            for worker, (pulse, at) in self._pulses.items()
        }


def needs_all(own: Seen) -> bool:
    """True if a main thread waits for the other workers, or may do so, and not only for a moment."""
    return own.doing in _NEEDS_ALL and own.seconds > _STANDS_SECONDS


def _left_alone(seen: Mapping[int, Seen]) -> str | None:
    """A sentence about workers that left a loop in which others are in a later iteration; None if there are none.

    Others that wait in the very iteration after which it was left wait for its gradients: it was left in between.
    """
    last = max(each.left for each in seen.values())
    stayed = [
        worker
        for worker, each in seen.items()
        if each.left < last
        and (last < each.iteration if each.doing is Doing.COMPUTING else last == each.iteration and each.doing in WAITS)
    ]
    if not stayed:
        return None
    left = sorted(worker for worker, each in seen.items() if each.left == last)
    return (
        f"{name_workers(left)} left the loop over the loader after iteration {last}, and {name_workers(sorted(stayed))}"
        " did not: leave it on all workers after the same batch"
    )


def _kept_waiting(seen: Mapping[int, Seen]) -> str:
    """A sentence about workers that keep the others waiting, and their activities."""
    each = " and ".join(f"worker {rank} {doing}" for rank, doing in seen.items())
    return f"{each}, while the others waited for it: see what its script does there, then start again"
