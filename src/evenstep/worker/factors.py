"""The driving factors of a worker's speed: the shares of its processors and of its memory that it can have."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import final

import psutil

from evenstep.core.values import Factors


@final
class FactorSampler:
    """Reads the driving factors of a worker on a CPU, for predictors that use them.

    LB-BSP (arXiv 1806.02508; SoCC'20) uses `100 - cpu_percent` of the whole machine since the last reading. That
    counts the worker's own work as taken, and it falls to 0 while a competitor uses the cores of a waiting worker.
    Here the share is of the cores that the worker may use, minus what other processes took of them, but at least the
    worker's fair share: a thread with one competitor on its core reads 0.5, whether it computes or waits. The quota of
    the worker's control group is an upper bound.

    Args:
        threads: The number of threads of this worker that compute at once.
        clock: Returns seconds that only rise.
        root: The folder that holds `proc` and `sys`.
    """

    def __init__(self, *, threads: int, clock: Callable[[], float], root: Path = Path("/")) -> None:
        self._threads = threads
        self._clock = clock
        # The CPU quota of this process's control group and of its parents.
        found = group_folders(root, "cpu", two=("cpu.max",), one=("cpu.cfs_quota_us", "cpu.cfs_period_us"))
        self._quota_files = [tuple(folder / name for name in names) for folder, names in found]
        self._cores = usable_cores()
        self._taken = (-math.inf, 0.0, 0.0)  # Time of the last reading, and busy seconds then: all, and our own.
        self._share = 1.0
        self._memory = (-math.inf, 1.0)

    def sample(self) -> Factors:
        """Read the current factors: the cores at most every 0.1 s and the memory at most every 4 s. Never raises."""
        now = self._clock()
        if now - self._memory[0] >= 4.0:
            memory = psutil.virtual_memory()
            self._memory = (now, memory.available / memory.total)
        return Factors(cpu_availability=self._cpu(), memory_availability=self._memory[1])

    def _cpu(self) -> float:
        now = self._clock()
        before, busy_before, own_before = self._taken
        if now - before >= 0.1:  # Times come in ticks of 10 ms.
            busy, own = _busy_seconds(self._cores), time.process_time()
            if math.isfinite(before):
                others = max((busy - busy_before) - (own - own_before), 0.0) / (now - before)
                self._share = share_left(cores=len(self._cores), threads=self._threads, others=others)
            self._taken = (now, busy, own)
        quota = min(map(_quota, self._quota_files), default=math.inf)
        return min(self._share, quota / min(self._threads, len(self._cores)), 1.0)


def usable_cores() -> frozenset[int]:
    """Return the cores that this thread may run on, given `taskset`, cpusets and containers."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except AttributeError:  # Not every system has it.
        return frozenset(range(os.cpu_count() or 1))


def share_left(*, cores: int, threads: int, others: float) -> float:
    """Return the share, 0 to 1, of the processors that `threads` busy threads on `cores` cores could have.

    `others` is the number of these cores that other processes took on average. While the threads wait, others may take
    all cores, but would have to share them afterwards.
    """
    wanted = min(threads, cores)
    fair = cores * wanted / (cores + wanted)
    return min(max(cores - others, fair) / wanted, 1.0)


def _busy_seconds(cores: frozenset[int]) -> float:
    """Return the seconds that these cores were busy since the machine started."""
    times = psutil.cpu_times(percpu=True)
    return math.fsum(
        sum(times[core][:8]) - times[core].idle - getattr(times[core], "iowait", 0.0)
        for core in cores
        if core < len(times)
    )


def group_folders(
    root: Path, controller: str, *, two: tuple[str, ...], one: tuple[str, ...]
) -> list[tuple[Path, tuple[str, ...]]]:
    """Return the folders of this process's control group and its parents that have these files, in version 2 or 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, tuple[str, ...]]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        names = one if controllers else two
        inside = Path(path.lstrip("/"))
        folders = (top / part for part in (inside, *inside.parents))
        found += [(each, names) for each in folders if all((each / name).exists() for name in names)]
    return found


def _quota(files: tuple[Path, ...]) -> float:
    """Return the number of cores whose time the group may use; infinite without a quota."""
    try:
        quota, period = " ".join(file.read_text() for file in files).split()
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    except (OSError, ValueError):  # `max`, or a removed group.
        return math.inf
