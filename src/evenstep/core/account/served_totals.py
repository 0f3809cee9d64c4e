"""What the servers see of each worker's time, in running totals."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, final

from evenstep.core.account.cause import Cause
from evenstep.core.account.served import ServedWorker, served_verdict
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
        self._began: float | None = None
        self._ended = 0.0
        self._workers: dict[int, _Totals] = {}

    @property
    def seconds(self) -> float:
        """From the first answer to the last push."""
        return 0.0 if self._began is None else max(self._ended - self._began, 0.0)

    def joined(self, worker: int) -> None:
        """A worker is here, maybe again."""
        known = self._workers.setdefault(worker, _Totals())
        known.since, known.lost = None, None

    def left(self, worker: int, why: str) -> None:
        """A worker is gone."""
        self.finished = self.finished or why == Why.DONE
        known = self._workers.setdefault(worker, _Totals())
        known.since, known.lost = None, None if why == Why.DONE else why

    def answered(self, worker: int, now: float, *, held: float, lead: int, over: bool) -> None:
        """A worker may go on, after it was held for so long; or the pass is `over`."""
        known = self._workers.setdefault(worker, _Totals())
        known.wait += held
        known.lead = max(known.lead, lead)
        known.since = None if over else now
        self._began = now if self._began is None else self._began

    def pushed(self, worker: int, now: float, *, samples: int, compute_seconds: float) -> None:
        """A worker pushed what it computed on so many samples."""
        known = self._workers.setdefault(worker, _Totals())
        self.samples += samples
        self._ended = now
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
                lost=each.lost,
            )
            for worker, each in sorted(self._workers.items())
            if each.iterations
        ]

    def batch_sizes(self) -> Sequence[int]:
        """The most common batch size of every worker that has pushed anything; the ends of epochs have smaller ones."""
        return [each.sizes.most_common(1)[0][0] for _, each in sorted(self._workers.items()) if each.sizes]

    def verdict(self) -> Verdict:
        """The verdict on the workers that have pushed anything."""
        return served_verdict(self.workers())


@final
@dataclass(slots=True)
class _Totals:
    """One worker's; `since` is when it was answered last, None where it is not at work."""

    since: float | None = None
    lost: str | None = None
    iterations: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    own: float = 0.0
    compute: float = 0.0
    wait: float = 0.0
    lead: int = 0
    even_iterations: int = 0
    even_samples: int = 0
    even_compute: float = 0.0
