"""The verdict on a run on parameter servers, where workers do not meet: which one is slow, why, and who waits for it.

A worker that was lost or left before the others is reported as such and never called slow: its times do not show what
held others up afterwards.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

import numpy as np

from evenstep.core.supervision import Why
from evenstep.report.account.absences import EARLY, Absences
from evenstep.report.account.account import ALIKE, Part, over_others
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
from evenstep.telemetry.events import Event, Joined, Left, Pushed

_FEWEST: Final = 20
"""The least iterations for a verdict: without a barrier, workers take a while to drift apart."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServedWorker:
    """One worker in a run; seconds are sums over its `iterations`.

    Attributes:
        worker: Its rank.
        iterations: The number of iterations that it finished; 1 or more.
        seconds: All of its time, from its first iteration to its last.
        compute: Time spent computing.
        wait: Time held for others.
        rest: The remaining time by cause; only `SCRIPT` if the causes are unknown.
        lead: Its largest lead, in iterations.
        pace: Its seconds per sample at sizes that all workers had; None if there were no common sizes.
        lost: The reason why it left before the end, `EARLY` if by itself; None if it stayed.
    """

    worker: int
    iterations: int
    seconds: float
    compute: float
    wait: float
    rest: Mapping[Part, float]
    lead: int
    pace: float | None
    lost: str | None = None

    def means(self) -> dict[Part, float]:
        """Its seconds in an average iteration, by cause."""
        parts = {Part.COMPUTE: self.compute, **self.rest}
        return {cause: seconds / self.iterations for cause, seconds in parts.items()}


def served_slowdowns(workers: Sequence[ServedWorker]) -> dict[int, float]:
    """Each worker's seconds per sample over the median of the others'; empty if there were no common sizes."""
    paces = [each.pace for each in workers if each.pace]
    if len(paces) < len(workers):
        return {}
    return {workers[index].worker: ratio for index, ratio in over_others(paces).items()}


def common_paces(by_size: Mapping[int, Mapping[float, tuple[int, float]]], share: float) -> dict[int, float]:
    """Each worker's seconds per sample at an equal share, or at all of its sizes if the usual ones are similar.

    Workers with fewer than three iterations at such sizes are left out.

    Args:
        by_size: By worker and batch size, the number of iterations and their seconds of compute.
        share: An equal share of the global batch, in samples.
    """
    even = {
        worker: {size: each for size, each in sizes.items() if abs(size - share) <= ALIKE * share}
        for worker, sizes in by_size.items()
    }
    paces = {worker: pace for worker, sizes in even.items() if (pace := _pace(sizes)) is not None}
    if len(paces) < len(by_size):
        usual = [np.median(np.repeat([*sizes], [count for count, _ in sizes.values()])) for sizes in by_size.values()]
        if all(abs(each - np.mean(usual)) <= ALIKE * np.mean(usual) for each in usual):
            return {worker: pace for worker, sizes in by_size.items() if (pace := _pace(sizes)) is not None}
    return paces


def _pace(sizes: Mapping[float, tuple[int, float]]) -> float | None:
    computed = {size: each for size, each in sizes.items() if size > 0}
    if sum(count for count, _ in computed.values()) < 3:  # One or two may have been disturbed.
        return None
    seconds = sum(seconds for _, seconds in computed.values())
    return seconds / sum(size * count for size, (count, _) in computed.items())


def served_verdict(
    workers: Sequence[ServedWorker], *, longer: Sequence[ServedWorker] | None = None, name_lost: bool = True
) -> Verdict:
    """The verdict on these workers.

    If they have few iterations, the `longer` ones of the same run decide whether there are enough for a verdict.
    Without `name_lost`, only those absent workers are named that left by themselves.
    """
    everyone = list(workers)
    if all(each.lost is not None for each in workers):  # A script may end its loop after some steps on all of them.
        everyone = [replace(each, lost=None) if each.lost == EARLY else each for each in workers]
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
    for each in gone:
        if each.lost == EARLY:
            texts.append(f"Worker {each.worker} left early, after {counted(each.iterations)}.")
        elif name_lost:
            texts.append(f"Worker {each.worker} was lost after {counted(each.iterations)} ({each.lost}).")
    return replace(verdict, text=" ".join(texts))


def served_long_enough(workers: Sequence[ServedWorker]) -> bool:
    """True if these workers were at work long enough for a verdict."""
    return max(each.iterations for each in workers) >= _FEWEST


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
    cause = max(means[worker], key=lambda each: means[worker][each] - np.median([of[each] for of in means.values()]))
    if ratios[worker] < SLOW:  # Its smaller size makes up for its seconds per sample.
        worker, cause = slowest, Part.COMPUTE
    slow = pace.get(worker) if cause is Part.COMPUTE else ratios[worker]
    lead = max(each.lead for each in workers)
    why = WHY.get(cause, "computes longest" if slow is None else f"computes {times(slow)} slower")
    if cause is not Part.COMPUTE and len(means[worker]) == 2:
        why = "spends time outside of compute (input, script or communication; a run directory tells which)"
    waiting = "no worker waits for it" if cost < COSTLY else f"waiting for it takes {cost:.0%} of all workers' time"
    ahead = f", and the others ran up to {counted(lead)} ahead" if lead else ""
    text = f"Worker {worker} {why}; {waiting}{ahead}."
    return Verdict(worker=worker, cause=cause, slowdown=slow, cost=cost, text=text)


@final
class ServedTotals:
    """Each worker's time as the servers see it, in running totals; memory does not grow with the run.

    A worker's own time lies between an answer and its next push: its compute, which it reports, and the rest.

    Attributes:
        samples: Samples of all pushes.
        finished: Whether any worker has left because it had finished.
    """

    def __init__(self, share: float) -> None:
        """`share` is an equal share of the global batch, in samples."""
        self.samples = 0
        self.finished = False
        self._share = share
        self._absences = Absences()
        self._workers: defaultdict[int, _Totals] = defaultdict(_Totals)

    @property
    def seconds(self) -> float:
        """The longest time that any worker has spent in its iterations, without the time between epochs."""
        return max((each.spent for each in self._workers.values()), default=0.0)

    def take(self, event: Event) -> None:
        """Add an event of a server."""
        self._absences.take(event)
        match event:
            case Joined() | Left():
                known = self._workers[event.worker]
                known.since = known.counted = None
                self.finished = self.finished or (isinstance(event, Left) and event.why == Why.DONE)
            case Pushed():
                self._pushed(event, self._workers[event.worker])

    def _pushed(self, push: Pushed, known: "_Totals") -> None:
        self.samples += push.samples
        known.count(push.at)
        if known.since is None:
            return
        _, microseconds, *_ = push.row  # As in `Reports`.
        seconds = microseconds / 1e6
        known.iterations += 1
        before, spent = known.sizes.get(push.samples, (0, 0.0))
        known.sizes[push.samples] = before + 1, spent + seconds
        known.own += push.at - known.since
        known.compute += seconds
        known.since = None

    def answered(self, worker: int, now: float, *, held: float, lead: int, over: bool) -> None:
        """Note that a worker may continue, after it was `held` for that many seconds, or that the pass is `over`."""
        known = self._workers[worker]
        known.wait += held
        known.lead = max(known.lead, lead)
        known.count(now)
        known.since = known.counted = None if over else now

    def workers(self) -> Sequence[ServedWorker]:
        """Every worker that has pushed."""
        lost, pushed = self._absences.reasons, {worker: each for worker, each in self._workers.items() if each.sizes}
        paces = common_paces({worker: each.sizes for worker, each in pushed.items()}, self._share)
        return [
            ServedWorker(
                worker=worker,
                iterations=each.iterations,
                seconds=each.own + each.wait,
                compute=each.compute,
                wait=each.wait,
                rest={Part.SCRIPT: max(each.own - each.compute, 0.0)},
                lead=each.lead,
                pace=paces.get(worker),
                lost=lost.get(worker),
            )
            for worker, each in sorted(pushed.items())
        ]

    def batch_sizes(self) -> Sequence[int]:
        """The most common batch size of every worker that has pushed; sizes are smaller at the ends of epochs."""
        known = [each.sizes for _, each in sorted(self._workers.items()) if each.sizes]
        return [int(max(sizes, key=lambda size: sizes[size][0])) for sizes in known]


@final
@dataclass(slots=True)
class _Totals:
    """One worker: `since` its last answer, None if it is not at work; `spent` seconds in passes until `counted`.

    `sizes` holds, by batch size, the number of iterations and their seconds of compute.
    """

    since: float | None = None
    counted: float | None = None
    spent: float = 0.0
    iterations: int = 0
    sizes: dict[float, tuple[int, float]] = field(default_factory=dict)
    own: float = 0.0
    compute: float = 0.0
    wait: float = 0.0
    lead: int = 0

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
