"""How much of the processor one thread got of what it wanted, as the scheduler of Linux counts it."""

import threading
from pathlib import Path
from typing import Final, final

from evenstep.worker.factors.kernel_file import KernelFile, number

_MIN_RUNNABLE: Final = 100
_MIN_NANOSECONDS: Final = 50_000_000


@final
class RunQueue:
    """The scheduler's own record of the calling thread. All that is known stands still while the thread waits.

    `/proc/thread-self/sched` has two averages that decay by half every 32 ms (PELT): the part of time that the thread
    ran, and the part that it ran or stood in a run queue. `/proc/thread-self/schedstat` has the sums of both times.

    Args:
        root: The folder that holds `proc`.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / "proc" / "thread-self"
        self._thread: int | None = None
        self._averages: KernelFile | None = None
        self._sums: KernelFile | None = None
        self._before: tuple[int, int] | None = None
        self._mean: float | None = None

    def recent_share(self) -> float | None:
        """Of the time in which the thread wanted to run, the part that it ran: now, over some 50 ms before.

        Time in which a quota forbade it to run is not counted. None where it hardly wanted to run lately (less than a
        tenth of the time), or where the kernel does not tell.
        """
        self._follow_the_thread()
        text = b"" if self._averages is None else self._averages.read()
        running, runnable = number(text, b"se.avg.util_avg"), number(text, b"se.avg.runnable_avg")
        if running is None or runnable is None or runnable < _MIN_RUNNABLE:
            return None
        return min(running / runnable, 1.0)

    def mean_share(self) -> float | None:
        """The same part over a longer time, and with the time in which a quota forbade it to run.

        It is taken anew at the first call after the thread has wanted to run for 50 ms: periods of a quota and slices
        of time are that long. None before the first such call, or where the kernel does not tell.
        """
        self._follow_the_thread()
        fields = b"" if self._sums is None else self._sums.read()
        ran, queued, *_ = (*(int(field) for field in fields.split()), 0, 0)
        if self._before is None:
            self._before = ran, queued
        newly_ran, newly_queued = ran - self._before[0], queued - self._before[1]
        if newly_ran + newly_queued >= _MIN_NANOSECONDS:
            self._before = ran, queued
            self._mean = newly_ran / (newly_ran + newly_queued)
        return self._mean

    def close(self) -> None:
        """Close the files."""
        for file in (self._averages, self._sums):
            if file is not None:
                file.close()

    def _follow_the_thread(self) -> None:
        """An open file stays with the thread that opened it."""
        thread = threading.get_native_id()
        if thread != self._thread:
            self.close()
            self._thread, self._before, self._mean = thread, None, None
            self._averages = KernelFile(self._folder / "sched")
            self._sums = KernelFile(self._folder / "schedstat")
