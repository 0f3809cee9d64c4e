"""What the servers see of each worker's time, in running totals."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, final

from evenstep.core.account.cause import Cause
from evenstep.core.account.served import EARLY, ServedWorker, served_verdict
from evenstep.core.account.verdict import Verdict
from evenstep.core.supervision import Why

_FEWEST: Final = 3
_NEARLY: Final = 8


@final
class ServedTotals:
    """Takes what workers ask and are answered; its memory does not grow with the length of the run.

    A worker's own time is that between an answer and its next push: its compute, which it tells, and the rest.

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
        """The most that any worker has spent in its iterations; what lies between epochs is not in it."""
        return max((each.spent for each in self._workers.values()), default=0.0)

    def joined(self, worker: int) -> None:
        """A worker is here, maybe again."""
        known = self._workers.setdefault(worker, _Totals())
        known.since, known.counted, known.lost, known.done = None, None, None, False

    def began(self, worker: int, number: int) -> None:
        """A worker begins the pass of this number."""
        self._workers.setdefault(worker, _Totals()).latest_pass = number
        self._latest_pass = max(self._latest_pass, number)

    def left(self, worker: int, why: str, *, early: bool = False) -> None:
        """A worker is gone; `early`: it is done, and was in the middle of a pass."""
        known = self._workers.setdefault(worker, _Totals())
        known.since, known.counted, known.done = None, None, why == Why.DONE
        known.lost = (EARLY if early else None) if known.done else why
        self.finished = self.finished or known.done

    def answered(self, worker: int, now: float, *, held: float, lead: int, over: bool) -> None:
        """A worker may go on, after it was held for so long; or the pass is `over`."""
        known = self._workers.setdefault(worker, _Totals())
        known.wait += held
        known.lead = max(known.lead, lead)
        known.count(now)
        known.since = known.counted = None if over else now

    def pushed(self, worker: int, now: float, *, samples: int, compute_seconds: float) -> None:
        """A worker pushed what it computed on so many samples."""
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
        """Every worker that has pushed anything."""
        return [
            ServedWorker(
                worker=worker,
                iterations=each.iterations,
                seconds=each.own + each.wait,
                compute=each.compute,
                wait=each.wait,
                rest={Cause.SCRIPT: max(each.own - each.compute, 0.0)},
                lead=each.lead,
                pace=each.even_compute / each.even_samples if each.even_iterations >= _FEWEST else None,
                lost=EARLY if self._missed_pass(each) else each.lost,
            )
            for worker, each in sorted(self._workers.items())
            if each.iterations
        ]

    def _missed_pass(self, worker: "_Totals") -> bool:
        """Whether it was done before the last pass; servers that were started again know of no pass before that."""
        return worker.done and 0 <= worker.latest_pass < self._latest_pass

    def batch_sizes(self) -> Sequence[int]:
        """The most common batch size of every worker that has pushed anything; the ends of epochs have smaller ones."""
        return [each.sizes.most_common(1)[0][0] for _, each in sorted(self._workers.items()) if each.sizes]

    def verdict(self, *, name_lost: bool = True) -> Verdict:
        """The verdict on the workers that have pushed anything; `name_lost` as in `served_verdict`."""
        return served_verdict(self.workers(), name_lost=name_lost)


@final
@dataclass(slots=True)
class _Totals:
    """One worker's.

    Attributes:
        since: When it was answered last; None where it is not at work.
        counted: Until when its time is in `spent`; None between passes.
        spent: Seconds from its first answer in each pass to its last one.
    """

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
        """Take the time until now as spent, within a pass."""
        if self.counted is not None:
            self.spent += now - self.counted
            self.counted = now
