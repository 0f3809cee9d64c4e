"""Where the limits of this process's control groups stand, in version 1 and 2 of Linux's control groups."""

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Final, final

from evenstep.worker.factors.kernel_file import KernelFile
from evenstep.worker.factors.spaced import Spaced

_POLL_AGAIN_SECONDS: Final = 10.0


@final
class GroupFiles:
    """Certain files of this process's groups, from its own up to the topmost that is visible here; limits hold at each.

    Which groups those are is looked up every ten seconds.

    Args:
        root: The folder that holds `proc`, and under which the mount points are looked up.
        controller: Its name in version 1, such as `cpu`; version 2 has one tree for all.
        versions: The names of the files that belong together, for each version.
        clock: Seconds that only rise.
    """

    def __init__(
        self, root: Path, controller: str, versions: tuple[tuple[str, ...], ...], *, clock: Callable[[], float]
    ) -> None:
        self._root = root
        self._controller = controller
        self._versions = versions
        self._groups = KernelFile(root / "proc/self/cgroup")
        self._membership: bytes | None = None
        self._files: list[tuple[KernelFile, ...]] = []
        self._look = Spaced(self._look_up, seconds=_POLL_AGAIN_SECONDS, clock=clock)

    def present(self) -> list[tuple[KernelFile, ...]]:
        """The open files of each group that has them all, the process's own group first."""
        self._look.value()
        return self._files

    def close(self) -> None:
        """Close all files."""
        self._groups.close()
        self._close_files()

    def _close_files(self) -> None:
        for files in self._files:
            for file in files:
                file.close()
        self._files = []

    def _look_up(self) -> None:
        membership = self._groups.read()
        if membership == self._membership:
            return
        self._close_files()
        self._membership = membership
        for folder in group_folders(self._root, self._controller, membership.decode()):
            for names in self._versions:
                if all((folder / name).exists() for name in names):
                    self._files.append(tuple(KernelFile(folder / name) for name in names))


def group_folders(root: Path, controller: str, membership: str) -> list[Path]:
    """The folders of a process's groups, its own first; `membership` is its `/proc/PID/cgroup`."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    lines = [line.split(":", 2) for line in membership.splitlines() if line.count(":") >= 2]
    return [folder for _, names, path in lines for folder in _folders(root, controller, mounts, names=names, path=path)]


def _folders(root: Path, controller: str, mounts: list[str], *, names: str, path: str) -> Iterator[Path]:
    """The folders of one line of /proc/self/cgroup; `names` is empty for the tree of version 2."""
    if names and controller not in names.split(","):
        return
    for mount in mounts:
        before, _, after = mount.partition(" - ")
        what, where = before.split(), after.split()
        if len(what) < 5 or len(where) < 3 or where[0] != ("cgroup" if names else "cgroup2"):
            continue
        if names and controller not in where[2].split(","):
            continue
        top = root / what[4].lstrip("/")
        inside = _below(path, what[3])
        yield from (top / part for part in (inside, *inside.parents))
        return


def _below(path: str, mounted: str) -> PurePosixPath:
    """The group's path below the part of the tree that is mounted; the top where it is not below it."""
    inside = PurePosixPath(path)
    if ".." in inside.parts or not inside.is_relative_to(mounted):
        return PurePosixPath()
    return inside.relative_to(mounted)
