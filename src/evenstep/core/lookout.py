"""Which workers this one waits for in vain, found before a collective's own time limit has passed.

A process that is stopped is known for certain, but only on the same machine. A worker that is merely silent may hold
Python's global lock, so it is not lost while another worker on its machine is heard. It is taken to do what it did.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, final

from evenstep.core.activity import Doing, Pulse, Seen, behind
from evenstep.core.workers import name_workers

_STANDS_SECONDS: Final = 1.2
"""How long a main thread does one thing before this worker looks at the others: three pulses, far below any limit."""
TIMES_LONGEST: Final = 5
"""How many times as long as the longest seen so far something may take; nvidia-resiliency-ext has the same factor."""

_NEEDS_ALL: Final = frozenset({Doing.PREPARING, Doing.COMPUTING, Doing.WAITING})
"""What does not end without the other workers; the models of FSDP wait for them while they compute."""
_ALIKE: Final = frozenset({Doing.FETCHING, Doing.COMPUTING, Doing.CHECKPOINTING})
"""What takes about as long each time. Between two iterations a script may do anything, such as an evaluation."""


@final
class Lookout:
    """One worker's view of the signs of life of the others, by time.

    Args:
        rank: This worker's.
        machines: Of all workers, by rank; on the same one, workers see each other's processes.
        silent_seconds: How long a worker may show no sign of life while this one waits.
        timeout_seconds: How long a worker that is alive may keep others waiting; half of it if that would be more
            than `TIMES_LONGEST` times as long as its like has ever taken.
    """

    def __init__(self, rank: int, machines: Sequence[str], *, silent_seconds: float, timeout_seconds: float) -> None:
        self._rank = rank
        self._machines = machines
        self._others = [worker for worker in range(len(machines)) if worker != rank]
        self._silent_seconds = silent_seconds
        self._timeout_seconds = timeout_seconds
        self._signs: dict[int, float] = {}
        """The last sign of life of each other worker; empty unless this one waits."""
        self._pulses: dict[int, tuple[Pulse, float]] = {}
        """The last pulse of each worker, and when it was new."""
        self._longest: dict[Doing, float] = {}
        self._looked = self._since = 0.0

    def look(
        self, own: Seen, now: float, *, stopped: Collection[int], pulses: Mapping[int, Pulse] | None
    ) -> str | None:
        """The sentence about the workers that this one waits for in vain; None if there are none.

        Args:
            own: What this worker's main thread does.
            now: Seconds of any clock that does not go back.
            stopped: The workers on this machine whose processes are stopped.
            pulses: Of the other workers; None if there are no new ones.
        """
        if not needs_all(own):
            self._learn(self._others_seen(now).values())
            self._signs.clear()
            self._pulses.clear()
            return None
        if not self._signs:
            self._begin(now - min(own.seconds, self._silent_seconds / 2))
        elif now - self._looked > self._silent_seconds / 2:  # This process stood still itself, perhaps with the others.
            self._begin(now)
        self._looked = now
        beating = self._others if pulses is None else self._beating(pulses, now)
        heard = {self._machines[worker] for worker in beating}
        for worker in self._others:
            here = self._machines[worker] == self._machines[self._rank]
            if worker not in stopped if here else self._machines[worker] in heard:
                self._signs[worker] = now
        return self._lost(own, now, stopped) or self._late(own, now)

    def _begin(self, since: float) -> None:
        """This worker is taken to wait since then, when all others showed a sign of life."""
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
        """These have ended, after the time that they took."""
        for each in done:
            self._longest[each.doing] = max(each.seconds, self._longest.get(each.doing, 0.0))

    def _lost(self, own: Seen, now: float, stopped: Collection[int]) -> str | None:
        lost = [worker for worker, at in self._signs.items() if now - at > self._silent_seconds]
        if here := [worker for worker in lost if worker in stopped]:
            return (
                f"{name_workers(here)} stood still for {self._silent_seconds:g} s, stopped by a signal such as SIGSTOP:"
                " find out who sent it, then start again"
            )
        alive = [seen for worker, seen in self._others_seen(now).items() if worker not in lost]
        if lost and all(each.doing is Doing.WAITING for each in [own, *alive]):
            return (
                f"{name_workers(lost)} did not answer for {self._silent_seconds:g} s, nor did any other process of the"
                " run on that machine: look at its output and at the network, then start again"
            )
        return None

    def _late(self, own: Seen, now: float) -> str | None:
        """The sentence about workers that are alive but keep all others waiting for longer than the limit."""
        seen = {self._rank: own, **self._others_seen(now)}
        late = {worker: seen.pop(worker) for worker in behind(seen)}
        if not late or any(each.doing is not Doing.WAITING for each in seen.values()):
            return None
        stuck = all(min(now - self._since, each.seconds) > self._limit_seconds(each) for each in late.values())
        return kept_waiting(late) if stuck else None

    def _limit_seconds(self, seen: Seen) -> float:
        """How long others wait for this. What may be an evaluation or a first compilation has the whole time."""
        if seen.next_iteration < 1 or seen.doing not in _ALIKE:
            return self._timeout_seconds
        first = self._timeout_seconds if seen.doing is Doing.CHECKPOINTING else 0.0
        longest = TIMES_LONGEST * self._longest.get(seen.doing, first)
        return min(max(longest, self._timeout_seconds / 2), self._timeout_seconds)

    def _others_seen(self, now: float) -> dict[int, Seen]:
        """What the others do; the main thread of a worker that is silent is taken to do the same."""
        return {
            worker: replace(pulse.seen, seconds=pulse.seen.seconds + now - at)
            for worker, (pulse, at) in self._pulses.items()
        }


def needs_all(own: Seen) -> bool:
    """Whether a main thread waits for the other workers, or may do so, and not for a moment only."""
    return own.doing in _NEEDS_ALL and own.seconds > _STANDS_SECONDS


def kept_waiting(seen: Mapping[int, Seen]) -> str:
    """The sentence about workers that keep the others waiting with what they do."""
    each = " and ".join(f"worker {rank} {doing}" for rank, doing in seen.items())
    return f"{each}, while the others waited for it: see what its script does there, then start again"
