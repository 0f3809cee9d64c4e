"""The verdict on a run on parameter servers, where workers do not meet: which is slow, why, and who waits for it.

A worker that was lost, or left before the others, is told as such and never called slow: what it did before does not
say what held others up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from evenstep.core.account.account import over_others
from evenstep.core.account.cause import Cause
from evenstep.core.account.length import counted, long_enough
from evenstep.core.account.verdict import COSTLY, SLOW, SPREAD, WHY, Verdict, spread, times, undecided

_OUTSIDE: Final = "spends time outside of compute (input, script or communication; a run directory tells which)"

EARLY: Final = "left early"
"""Why a worker is absent at the end that left its loop by itself, or left the run between two epochs."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWorker:
    """One worker over a run; seconds are sums over its `iterations`, and `seconds` all of its time.

    Attributes:
        worker: Its rank.
        iterations: The iterations that it finished; 1 or more.
        seconds: From its first iteration to its last.
        compute: In compute.
        wait: Held for others.
        rest: The rest by cause, where that is known; as `SCRIPT` alone where it is not.
        lead: Its largest lead, in iterations.
        pace: Its seconds per sample at sizes that all workers had; None where they had none in common.
        lost: Why it left before the end, `EARLY` where it did so by itself; None where it did not.
    """

    worker: int
    iterations: int
    seconds: float
    compute: float
    wait: float
    rest: Mapping[Cause, float]
    lead: int
    pace: float | None
    lost: str | None = None

    def means(self) -> dict[Cause, float]:
        """Its own seconds of an average iteration, by cause."""
        parts = {Cause.COMPUTE: self.compute, **self.rest}
        return {cause: seconds / self.iterations for cause, seconds in parts.items()}


def served_slowdowns(workers: Sequence[ServedWorker]) -> dict[int, float]:
    """Each worker's seconds per sample over the median of the others'; empty where they had no sizes in common."""
    paces = [each.pace for each in workers if each.pace]
    if len(paces) < len(workers):
        return {}
    return {workers[index].worker: ratio for index, ratio in over_others(paces).items()}


def served_verdict(
    workers: Sequence[ServedWorker], *, longer: Sequence[ServedWorker] | None = None, name_lost: bool = True
) -> Verdict:
    """The verdict on these workers.

    Where they are over a few iterations, the `longer` ones of the same run tell whether there is enough to judge.
    Without `name_lost` only those are named as gone that left by themselves.
    """
    everyone = _without_early(workers)
    gone = [each for each in everyone if each.lost is not None]
    stayed = [each for each in everyone if each.lost is None]
    iterations, seconds = _length(longer or workers)
    lost = any(each.lost != EARLY for each in gone)
    verdict = (
        _verdict(stayed or everyone, lost=lost) if long_enough(iterations, seconds) else undecided(iterations, seconds)
    )
    told = [] if len(stayed) < 2 and gone else [verdict.text]
    told += [_gone(each) for each in gone if name_lost or each.lost == EARLY]
    return replace(verdict, text=" ".join(told))


def served_long_enough(workers: Sequence[ServedWorker]) -> bool:
    """Whether these workers were at work for long enough to be judged."""
    return long_enough(*_length(workers))


def _length(workers: Sequence[ServedWorker]) -> tuple[int, float]:
    return max(each.iterations for each in workers), max(each.seconds for each in workers)


def _without_early(workers: Sequence[ServedWorker]) -> list[ServedWorker]:
    """The same, none of whom left early where all did who were not lost: a script may end its loop after some steps."""
    if any(each.lost is None for each in workers):
        return list(workers)
    return [replace(each, lost=None) if each.lost == EARLY else each for each in workers]


def _gone(worker: ServedWorker) -> str:
    after = f"after {counted(worker.iterations)}"
    if worker.lost == EARLY:
        return f"Worker {worker.worker} left early, {after}."
    return f"Worker {worker.worker} was lost {after} ({worker.lost})."


def _verdict(workers: Sequence[ServedWorker], *, lost: bool) -> Verdict:
    cost = sum(each.wait for each in workers) / max(sum(each.seconds for each in workers), 1e-12)
    means = {each.worker: each.means() for each in workers}
    own = {worker: sum(parts.values()) for worker, parts in means.items()}
    ratios = dict(zip(own, over_others(list(own.values())).values(), strict=True))
    pace = served_slowdowns(workers)
    worker = max(own, key=lambda each: own[each])
    slowest = max(pace, key=lambda each: pace[each], default=worker)
    if ratios[worker] < SLOW and pace.get(slowest, 1.0) < SLOW:
        if cost >= SPREAD:
            return spread(cost, pace.get(slowest), barrier=False, lost=lost)
        text = f"No worker is slow: waiting takes {cost:.0%} of all workers' time."
        return Verdict(worker=None, cause=None, slowdown=None, cost=cost, text=text)
    cause = max(means[worker], key=lambda each: means[worker][each] - _median(means, each))
    if ratios[worker] < SLOW:  # Sizes have evened out what it needs for a sample.
        worker, cause = slowest, Cause.COMPUTE
    slow = pace.get(worker) if cause is Cause.COMPUTE else ratios[worker]
    lead = max(each.lead for each in workers)
    text = f"Worker {worker} {_why(cause, slow, means[worker])}; {_others(cost, lead)}."
    return Verdict(worker=worker, cause=cause, slowdown=slow, cost=cost, text=text)


def _why(cause: Cause, slow: float | None, parts: Mapping[Cause, float]) -> str:
    if cause is Cause.COMPUTE:
        return "computes longest" if slow is None else f"computes {times(slow)} slower"
    return WHY[cause] if len(parts) > 2 else _OUTSIDE


def _others(cost: float, lead: int) -> str:
    """What the slow worker meant for the others."""
    ahead = f", and the others ran up to {counted(lead)} ahead" if lead else ""
    waiting = "no worker waits for it" if cost < COSTLY else f"waiting for it takes {cost:.0%} of all workers' time"
    return f"{waiting}{ahead}"


def _median(means: Mapping[int, Mapping[Cause, float]], cause: Cause) -> float:
    return float(np.median([parts[cause] for parts in means.values()]))
