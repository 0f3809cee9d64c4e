"""What other processes, and other machines on the same host, take of the cores that this worker may use."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import psutil

from evenstep.worker.factors.kernel_file import KernelFile

_STOLEN_SECONDS: Final = 1.0
_BYTES_PER_CORE: Final = 160


def usable_cores() -> frozenset[int]:
    """The cores that this thread may run on: `taskset`, cpusets and containers are respected."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:  # Not every system has it.
        return frozenset(range(os.cpu_count() or 1))


def share_left(*, cores: int, threads: int, others: float) -> float:
    """The part of the processors wanted by `threads` busy threads that they could have beside `others`.

    `others` is the mean number of these cores that others were seen to take, while the threads ran or waited. Waiting
    leaves the cores to the others, so that these may be seen to take all; the threads would still get their fair share
    against as many busy threads as there are cores. So with one of each on one core it is a half in either case.
    """
    wanted = min(threads, cores)
    fair = cores * wanted / (cores + wanted)
    return min(max(cores - others, fair) / wanted, 1.0)


@final
class Cores:
    """The times of the usable cores from one reading to the next, this process's own subtracted.

    They come in ticks of 10 ms, so readings should lie 100 ms or more apart.

    Args:
        root: The folder that holds `proc`; where there is no `proc/stat`, psutil is asked.
        threads: The busy threads of this worker.
        clock: Seconds that only rise.
        own: The seconds of processor time that this process has used.
        usable: The cores to look at.
    """

    def __init__(
        self,
        root: Path,
        *,
        threads: int,
        clock: Callable[[], float],
        own: Callable[[], float] = time.process_time,
        usable: Callable[[], frozenset[int]] = usable_cores,
    ) -> None:
        self._file = KernelFile(root / "proc" / "stat", largest=4096 + _BYTES_PER_CORE * (os.cpu_count() or 1))
        self._threads = threads
        self._clock = clock
        self._own = own
        self._usable = usable
        self._before: tuple[frozenset[int], float, float, float, float] | None = None
        self._stolen = 0.0

    def read(self) -> tuple[float | None, float]:
        """`share_left` since the last reading (None at the first), and the part of the cores' time that was stolen.

        "Stolen" is what the host of a virtual machine gave to others while this one had work; averaged over about a
        second, because it is the sum of few ticks.
        """
        cores = self._usable()
        busy, stolen = self._times(cores)
        now = (cores, self._clock(), self._own(), busy, stolen)
        before, self._before = self._before, now
        if before is None or before[0] != cores or now[1] <= before[1]:
            return None, self._stolen
        elapsed, own, busy, stolen = (after - past for after, past in zip(now[1:], before[1:], strict=True))
        if busy + stolen > 0:
            forget = math.exp(-elapsed / _STOLEN_SECONDS)
            self._stolen = forget * self._stolen + (1.0 - forget) * stolen / (busy + stolen)
        others = max(busy - own, 0.0) / elapsed
        return share_left(cores=len(cores), threads=self._threads, others=others), self._stolen

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _times(self, cores: frozenset[int]) -> tuple[float, float]:
        """Busy and stolen seconds of these cores since the machine started."""
        if not self._file.is_open:
            return _times_of_psutil(cores)
        busy = stolen = 0
        for line in self._file.read().split(b"\n")[1:]:
            if not line.startswith(b"cpu"):
                break
            name, *fields = line.split()
            if int(name[3:]) in cores:
                user, nice, system, _idle, _io_wait, interrupt, soft_interrupt, steal = (int(f) for f in fields[:8])
                busy += user + nice + system + interrupt + soft_interrupt
                stolen += steal
        ticks = os.sysconf("SC_CLK_TCK")
        return busy / ticks, stolen / ticks


def _times_of_psutil(cores: frozenset[int]) -> tuple[float, float]:
    every = psutil.cpu_times(percpu=True)
    return sum(each.user + each.system for core, each in enumerate(every) if core in cores), 0.0
