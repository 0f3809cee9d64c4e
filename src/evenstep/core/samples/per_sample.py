"""The time of each sample besides its cost, fitted on the iterations as they come: w in t = s * (c + w * n + cost).

It uses only what all workers report and know, so all find the same.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, final

from evenstep.core.values import IntArray

THOUSAND: Final = 1000


@final
@dataclass(slots=True, kw_only=True, eq=False)
class PerSample:
    """Fits the part of an average sample's time that does not depend on its cost.

    With costs in average samples, n samples of total cost x take s * ((1 - p) * x + p * n) seconds on a worker: an
    average sample takes s whatever p is, so p changes neither speed estimates nor sizes, only who gets which samples. p
    is the same on all workers, s is each worker's own. For each worker, a least-squares plane through its last
    iterations gives p and, from the residuals, its error; the mean weighted by precision is p. A worker whose speed
    changes has large residuals and counts little. A new p is adopted if it differs by more than noise explains.

    The sums are of whole numbers, and the few operations after them are rounded alike on every processor and by every
    Python: no powers, and `fsum`, because `sum` of floats differs between releases.

    Args:
        warmup: The number of first iterations that are not counted, as caches fill in them.
        window: The number of latest iterations that are fitted.
        every: Iterations between fits, each of which takes about a millisecond. A worker needs as many in the window.
        sure: A change of p must exceed this many standard errors.
        least: A smaller change of p is not worth that samples move.
        precise: The range of standard errors: a smaller one is taken for the lower end, since the plane is not exact,
            and p is not adopted above the upper end.

    Attributes:
        thousandths: p, in thousandths, 0 to 1000.
    """

    warmup: int = 2
    window: int = 32
    every: int = 8
    sure: float = 3.0
    least: float = 0.03
    precise: tuple[float, float] = (0.005, 0.1)
    thousandths: int = field(init=False, default=0)
    _seen: int = field(init=False, default=0)
    _latest: deque[tuple[tuple[int, int, int], ...]] = field(init=False)

    def __post_init__(self) -> None:
        self._latest = deque(maxlen=self.window)

    def load(self, cost: float, samples: int) -> float:
        """The work of samples with this total cost, from which a worker's speed is measured, in average samples."""
        part = self.thousandths / THOUSAND
        return (1.0 - part) * cost + part * samples

    def observe(self, sizes: IntArray, costs: IntArray, microseconds: IntArray) -> None:
        """Take in one iteration of all workers, int64 of shape [workers] each; costs in thousandths of a sample's.

        The size is 0 for a worker without a report. The `microseconds` of compute are those of these samples.
        """
        self._seen += 1
        if self._seen <= self.warmup:
            return
        self._latest.append(tuple(zip(sizes.tolist(), costs.tolist(), microseconds.tolist(), strict=True)))
        if self._seen % self.every == 0:
            self._refit()

    def _refit(self) -> None:
        fits = list(self._fits())
        if not fits:
            return
        weights = [1.0 / (error * error) for _, error in fits]
        whole = math.fsum(weights)
        error = math.sqrt(1.0 / whole)
        part = math.fsum(weight * found for weight, (found, _) in zip(weights, fits, strict=True)) / whole
        part = min(max(part, 0.0), 1.0)
        step = abs(part - self.thousandths / THOUSAND)
        if error <= self.precise[1] and step > max(self.sure * error, self.least):
            self.thousandths = round(part * THOUSAND)

    def _fits(self) -> Iterator[tuple[float, float]]:
        """The p of each worker whose iterations determine it, and its standard error."""
        for of_worker in zip(*self._latest, strict=True):
            rows = [(cost, THOUSAND * size - cost, time) for size, cost, time in of_worker if min(size, cost, time) > 0]
            if len(rows) < self.every:
                continue
            # t = s * cost + s * p * (n - cost).
            xx, xy = sum(x * x for x, _, _ in rows), sum(x * y for x, y, _ in rows)
            yy, xt = sum(y * y for _, y, _ in rows), sum(x * t for x, _, t in rows)
            yt, tt = sum(y * t for _, y, t in rows), sum(t * t for _, _, t in rows)
            determinant = xx * yy - xy * xy
            speed, part = xt * yy - yt * xy, xx * yt - xy * xt
            if determinant <= 0 or speed <= 0:
                continue
            residual = max(tt * determinant - speed * xt - part * yt, 0) / determinant
            spread = residual / (len(rows) - 2) * (xx / determinant)
            yield part / speed, max(math.sqrt(spread) * (determinant / speed), self.precise[0])
