"""CPU availability: the part of the processors it wants that this worker could have now."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from evenstep.worker.factors.cores import Cores, usable_cores
from evenstep.worker.factors.quota import CpuQuota
from evenstep.worker.factors.run_queue import RunQueue
from evenstep.worker.factors.spaced import Spaced

_WINDOW_SECONDS: Final = 0.1
_STOLEN_SECONDS: Final = 4.0


@final
class CpuAvailability:
    """The worker's fair share against the competing demand, as it is at the end of its compute.

    Source: LB-BSP (arXiv 1806.02508; SoCC'20) takes `100 - cpu_percent` of the whole machine since the last reading,
    before the iteration. That is the mean of a window that ends where prediction begins, it counts the worker's own
    work as taken, and it falls to 0 while a competitor has the cores of a worker that waits. Three things differ here:

    * It is what the worker could have. A thread with one competitor on its core reads a half, computing or waiting.
    * It is the state at the end of the window, not the mean over it. The mean tells no more than the speed that was
      measured in the same window; a competitor that came in the middle of it shows in the state alone. The scheduler's
      own averages tell it (`RunQueue.recent_share`), with the competitors' number and weights in it.
    * The cgroup's quota is read as it stands, so that a change of it shows before it is felt.

    The scheduler's averages are those of the calling thread. Where it has hardly run lately, or there are none, or the
    worker has several busy threads, the times of the cores (in ticks, over 100 ms or more) tell what others take.
    Without that record, the thread's mean over its last iterations does. Nothing known is 1.

    A quota that is shared with other processes can run out sooner than it seems; while it stands unchanged, the
    thread's mean with its times of throttling bounds the result.
    """

    def __init__(self, root: Path, *, threads: int, clock: Callable[[], float]) -> None:
        self._threads = threads
        self._queue = RunQueue(root)
        self._cores = Cores(root, threads=threads, clock=clock)
        self._window = Spaced(self._cores.read, seconds=_WINDOW_SECONDS, clock=clock)
        self._quota = CpuQuota(root, clock=clock)
        self._quota_before: float | None = None

    def read(self) -> float:
        """From 0 to 1; never above the quota over the cores that the worker wants."""
        recent = self._queue.recent_share()
        alone = recent is not None and self._threads == 1
        # Of a thread whose own averages are known, only what the host steals is looked for.
        left, stolen = self._window.value(_STOLEN_SECONDS if alone else _WINDOW_SECONDS)
        if recent is None:
            share = _first_known(left, self._queue.mean_share())
        elif alone:
            share = recent
        else:
            share = min(recent, _first_known(left))
        share *= 1.0 - stolen
        quota, before = self._quota.cores(), self._quota_before
        self._quota_before = quota
        if math.isfinite(quota):
            mean = _first_known(self._queue.mean_share())
            share = min(share, quota / min(self._threads, len(usable_cores())), mean if quota == before else 1.0)
        return max(share, 0.0)

    def close(self) -> None:
        """Close the files."""
        self._queue.close()
        self._cores.close()
        self._quota.close()


def _first_known(*shares: float | None) -> float:
    return next((share for share in shares if share is not None), 1.0)
