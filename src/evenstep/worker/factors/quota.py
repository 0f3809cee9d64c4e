"""The CPU quota of this process's control group: a limit that is known before it is felt."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from evenstep.worker.factors.control_groups import GroupFiles
from evenstep.worker.factors.kernel_file import KernelFile

_FILES: Final = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


@final
class CpuQuota:
    """Reads the tightest quota on the path from the process's group up to the visible root, at every call anew.

    Args:
        root: The folder that holds `proc`, and under which the mount points are looked up.
        clock: Seconds that only rise.
    """

    def __init__(self, root: Path, *, clock: Callable[[], float]) -> None:
        self._groups = GroupFiles(root, "cpu", _FILES, clock=clock)

    def cores(self) -> float:
        """How many cores' time the group may use; infinite without a quota."""
        return min((_cores(files) for files in self._groups.present()), default=math.inf)

    def close(self) -> None:
        """Close the files."""
        self._groups.close()


def _cores(files: tuple[KernelFile, ...]) -> float:
    """The quota over the period, both in microseconds; `max` or -1 stands for no quota."""
    words = files[0].read().split()
    if not words or not words[0].isdigit():
        return math.inf
    for file in files[1:]:
        words += file.read().split()
    return int(words[0]) / int(words[1]) if len(words) > 1 and int(words[1]) else math.inf
