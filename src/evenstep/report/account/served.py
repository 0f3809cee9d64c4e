"""The verdict on a run on parameter servers, where workers do not meet: which is slow, why, and who waits for it.

A worker that was lost or left before the others is reported as such and never called slow: its times say nothing of
what held others up afterwards.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

import numpy as np

from evenstep.core.supervision import Why
from evenstep.report.account.account import Cause, over_others
from evenstep.report.account.verdict import (
    COSTLY,
    SLOW,
    SPREAD,
    WHY,
    Verdict,
    counted,
    head_text,
    no_worker_slow,
    sentences,
    sizes_text,
    spread,
    times,
    undecided,
)

_OUTSIDE: Final = "spends time outside of compute (input, script or communication; a run directory tells which)"

EARLY: Final = "left early"
"""Why a worker is absent at the end: it left its loop by itself, or left the run between two epochs."""
_FEWEST: Final = 20
"""Fewer iterations are too few to be judged: without a barrier, workers take a while to drift apart."""
_MIN_ITERATIONS: Final = 3
_NEARLY: Final = 8


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWorker:
    """One worker over a run; seconds are sums over its `iterations`.

    Attributes:
        worker: Its rank.
        iterations: The iterations that it finished; 1 or more.
        seconds: All of its time, from its first iteration to its last.
        compute: In compute.
        wait: Held for others.
        rest: The rest by cause; `SCRIPT` alone if the causes are unknown.
        lead: Its largest lead, in iterations.
        pace: Its seconds per sample at sizes that all workers had; None if they had none in common.
        lost: Why it left before the end, `EARLY` if it did by itself; None if it did not.
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
        """Its seconds of an average iteration, by cause."""
        parts = {Cause.COMPUTE: self.compute, **self.rest}
        return {cause: seconds / self.iterations for cause, seconds in parts.items()}


def served_slowdowns(workers: Sequence[ServedWorker]) -> dict[int, float]:
    """Each worker's seconds per sample over the median of the others'; empty if they had no sizes in common."""
    paces = [each.pace for each in workers if each.pace]
    if len(paces) < len(workers):
        return {}
    return {workers[index].worker: ratio for index, ratio in over_others(paces).items()}


def served_verdict(
    workers: Sequence[ServedWorker], *, longer: Sequence[ServedWorker] | None = None, name_lost: bool = True
) -> Verdict:
    """The verdict on these workers.

    If they have few iterations, the `longer` ones of the same run say whether there are enough to judge. Without
    `name_lost`, of the workers that are gone only those that left by themselves are named.
    """
    everyone = _without_early(workers)
    gone = [each for each in everyone if each.lost is not None]
    stayed = [each for each in everyone if each.lost is None]
    lost = any(each.lost != EARLY for each in gone)
    judged = longer or workers
    iterations, seconds = max(each.iterations for each in judged), max(each.seconds for each in judged)
    enough = served_long_enough(judged)
    verdict = (
        _verdict(stayed or everyone, lost=lost) if enough else undecided(iterations, seconds, _FEWEST - iterations)
    )
    texts = [] if len(stayed) < 2 and gone else [verdict.text]
    texts += [_gone(each) for each in gone if name_lost or each.lost == EARLY]
    return replace(verdict, text=" ".join(texts))


def served_long_enough(workers: Sequence[ServedWorker]) -> bool:
    """Whether these workers were at work long enough to be judged."""
    return max(each.iterations for each in workers) >= _FEWEST


def _without_early(workers: Sequence[ServedWorker]) -> list[ServedWorker]:
    """The workers, none of them early if all did that or were lost: a script may end its loop after some steps."""
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
        return no_worker_slow(cost)
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


@final
class ServedTotals:
    """What the servers see of each worker's time, in running totals; memory does not grow with the run.

    A worker's own time is that between an answer and its next push: its compute, which it reports, and the rest.

    Attributes:
        samples: Samples of all pushes.
        finished: Whether any worker has left because it was done.
    """

    def __init__(self, share: float) -> None:
        """`share` is an equal share of the global batch, in samples."""
        self.samples = 0
        self.finished = False
        self._share = share
        self._latest_pass = -1
        self._workers: dict[int, _Totals] = {}

    @property
    def seconds(self) -> float:
        """The most that any worker has spent in its iterations, without what lies between epochs."""
        return max((each.spent for each in self._workers.values()), default=0.0)

    def joined(self, worker: int) -> None:
        """A worker has joined, maybe again."""
        known = self._workers.setdefault(worker, _Totals())
        known.since, known.counted, known.lost, known.done = None, None, None, False

    def began(self, worker: int, number: int) -> None:
        """A worker has started the pass of this number."""
        self._workers.setdefault(worker, _Totals()).latest_pass = number
        self._latest_pass = max(self._latest_pass, number)

    def left(self, worker: int, why: str, *, early: bool = False) -> None:
        """A worker has left; `early`: it is done, in the middle of a pass."""
        known = self._workers.setdefault(worker, _Totals())
        known.since, known.counted, known.done = None, None, why == Why.DONE
        known.lost = (EARLY if early else None) if known.done else why
        self.finished = self.finished or known.done

    def answered(self, worker: int, now: float, *, held: float, lead: int, over: bool) -> None:
        """A worker may continue, after it was `held` for that many seconds; or the pass is `over`."""
        known = self._workers.setdefault(worker, _Totals())
        known.wait += held
        known.lead = max(known.lead, lead)
        known.count(now)
        known.since = known.counted = None if over else now

    def pushed(self, worker: int, now: float, *, samples: int, compute_seconds: float) -> None:
        """A worker has pushed a gradient of that many samples."""
        known = self._workers.setdefault(worker, _Totals())
        self.samples += samples
        known.count(now)
        if known.since is None:
            return
        known.iterations += 1
        known.sizes[samples] += 1
        known.own += now - known.since
        known.compute += compute_seconds
        known.since = None
        if abs(samples - self._share) * _NEARLY <= self._share:
            known.even_iterations += 1
            known.even_samples += samples
            known.even_compute += compute_seconds

    def workers(self) -> Sequence[ServedWorker]:
        """Every worker that has pushed."""
        return [
            ServedWorker(
                worker=worker,
                iterations=each.iterations,
                seconds=each.own + each.wait,
                compute=each.compute,
                wait=each.wait,
                rest={Cause.SCRIPT: max(each.own - each.compute, 0.0)},
                lead=each.lead,
                pace=each.even_compute / each.even_samples if each.even_iterations >= _MIN_ITERATIONS else None,
                lost=EARLY if self._missed_pass(each) else each.lost,
            )
            for worker, each in sorted(self._workers.items())
            if each.iterations
        ]

    def _missed_pass(self, worker: "_Totals") -> bool:
        """Whether it was done before the last pass; restarted servers know no earlier pass."""
        return worker.done and 0 <= worker.latest_pass < self._latest_pass

    def batch_sizes(self) -> Sequence[int]:
        """The most common batch size of every worker that has pushed; the ends of epochs have smaller ones."""
        return [each.sizes.most_common(1)[0][0] for _, each in sorted(self._workers.items()) if each.sizes]

    def verdict(self, *, name_lost: bool = True) -> Verdict:
        """The verdict on the workers that have pushed; `name_lost` as in `served_verdict`."""
        return served_verdict(self.workers(), name_lost=name_lost)


@final
@dataclass(slots=True)
class _Totals:
    """One worker: `since` its last answer, None if it is not at work; `spent` seconds in passes until `counted`."""

    since: float | None = None
    counted: float | None = None
    spent: float = 0.0
    lost: str | None = None
    done: bool = False
    latest_pass: int = -1
    iterations: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    own: float = 0.0
    compute: float = 0.0
    wait: float = 0.0
    lead: int = 0
    even_iterations: int = 0
    even_samples: int = 0
    even_compute: float = 0.0

    def count(self, now: float) -> None:
        if self.counted is not None:
            self.spent += now - self.counted
            self.counted = now


def served_summary_lines(totals: ServedTotals, scheme: str, *, name_lost: bool = True) -> list[str]:
    """A run on servers in one to four lines; none if no worker has finished. `name_lost` as in `served_verdict`."""
    workers = totals.workers()
    if not totals.finished or not workers:
        return []
    head = head_text(scheme, len(workers), totals.seconds, float(totals.samples))
    if len(workers) == 1:
        return [f"{head}."]
    verdict = served_verdict(workers, name_lost=name_lost)
    return [f"{head}; batch sizes {sizes_text(totals.batch_sizes())}.", *sentences(verdict.text)]
