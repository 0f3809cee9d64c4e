"""What each sample takes beside its cost, fitted on the iterations as they come: w in t = s * (c + w * n + cost).

It knows only what all workers report and all workers know, so all find the same.
"""

import math
from collections import deque
from collections.abc import Iterator
from typing import Final, final

from evenstep.core.values import IntArray

_WINDOW: Final = 32
_EVERY: Final = 8
_WARMUP: Final = 2
_FEWEST: Final = 8
_SIGNIFICANT: Final = 3.0
_LEAST_STEP: Final = 0.03
_LEAST_ERROR: Final = 0.005
_MOST_ERROR: Final = 0.1
THOUSAND: Final = 1000


@final
class PerSample:
    """Fits which part of an average sample's time does not depend on its cost.

    With costs in average samples, n samples of cost x take s * ((1 - p) * x + p * n) seconds on a worker: an average
    sample takes s whatever p is, so p changes neither the estimates of speed nor sizes, only who gets which samples. p
    is the same on all workers, s is each one's. For each worker, a least-squares plane through its last iterations
    gives p and its error by the residuals, and p is their mean by precision. A worker whose speed changes has large
    residuals and counts little. p is adopted if it differs by more than noise explains.

    The sums are of whole numbers, and the few operations after them are rounded alike on every processor and by every
    Python: no powers, and `fsum`, since `sum` of floats differs between releases.

    Attributes:
        thousandths: p, in thousandths, 0 to 1000.
    """

    def __init__(self) -> None:
        self.thousandths = 0
        self._seen = 0
        self._window: deque[tuple[tuple[int, int, int], ...]] = deque(maxlen=_WINDOW)

    def observe(self, sizes: IntArray, costs: IntArray, microseconds: IntArray) -> None:
        """Take in one iteration of all workers, int64 of shape [workers] each.

        Args:
            sizes: The samples of each worker; 0 for a worker that says nothing.
            costs: What they cost, in thousandths of an average sample.
            microseconds: The compute that depends on them.
        """
        self._seen += 1
        if self._seen <= _WARMUP:
            return
        self._window.append(tuple(zip(sizes.tolist(), costs.tolist(), microseconds.tolist(), strict=True)))
        if self._seen % _EVERY == 0:
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
        if error <= _MOST_ERROR and step > max(_SIGNIFICANT * error, _LEAST_STEP):
            self.thousandths = round(part * THOUSAND)

    def _fits(self) -> Iterator[tuple[float, float]]:
        """The p of each worker that tells something about it, and its standard error."""
        for of_worker in zip(*self._window, strict=True):
            rows = [(cost, THOUSAND * size - cost, time) for size, cost, time in of_worker if min(size, cost, time) > 0]
            if len(rows) < _FEWEST:
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
            yield part / speed, max(math.sqrt(spread) * (determinant / speed), _LEAST_ERROR)
