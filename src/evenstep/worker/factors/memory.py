"""Memory availability: the part of the memory that this worker could still have."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, final

import psutil

from evenstep.worker.factors.control_groups import GroupFiles
from evenstep.worker.factors.kernel_file import KernelFile, number
from evenstep.worker.factors.spaced import Spaced

_SECONDS: Final = 4.0
# For each version: the limit, what is used, and what of it would be dropped on demand, as a line of the statistics.
_FILES: Final = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
)
_RECLAIMABLE: Final = (b"total_inactive_file", b"inactive_file")


@final
class MemoryAvailability:
    """What is available over all there is: of the machine or of a control group's limit, whichever is tighter.

    Read every four seconds at most: it changes slowly, and reading it costs more than all the rest.

    Args:
        root: The folder that holds `proc`, and under which the mount points are looked up; where there is no
            `proc/meminfo`, psutil is asked.
        clock: Seconds that only rise.
    """

    def __init__(self, root: Path, *, clock: Callable[[], float]) -> None:
        self._machine = KernelFile(root / "proc/meminfo")
        self._groups = GroupFiles(root, "memory", _FILES, clock=clock)
        self._spaced = Spaced(self._read, seconds=_SECONDS, clock=clock)

    def read(self) -> float:
        """From 0 to 1."""
        return self._spaced.value()

    def close(self) -> None:
        """Close the files."""
        self._machine.close()
        self._groups.close()

    def _read(self) -> float:
        available, whole = self._available_and_whole()
        least = available / whole
        for limit_file, used_file, statistics_file in self._groups.present():
            limit = _integer(limit_file)
            if limit is None or not 0 < limit <= whole:
                continue
            used = _integer(used_file)
            if used is not None:
                least = min(least, (limit - used + _reclaimable(statistics_file)) / limit)
        return min(max(least, 0.0), 1.0)

    def _available_and_whole(self) -> tuple[int, int]:
        """The machine's memory, in bytes."""
        text = self._machine.read()
        available, whole = number(text, b"MemAvailable"), number(text, b"MemTotal")
        if available is not None and whole:
            return 1024 * available, 1024 * whole
        memory = psutil.virtual_memory()
        return memory.available, memory.total


def _integer(file: KernelFile) -> int | None:
    """The file's only number; None where there is another word, such as `max`."""
    text = file.read().strip()
    return int(text) if text.isdigit() else None


def _reclaimable(file: KernelFile) -> int:
    text = file.read()
    found = (number(text, name) for name in _RECLAIMABLE)
    return next((bytes_ for bytes_ in found if bytes_ is not None), 0)
