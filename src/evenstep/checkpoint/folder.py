"""A folder of checkpoints. Each one is written under another name, and renamed once it is complete and on the disk.

This module knows files and their digests, but not their meaning.
"""

import fcntl
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, TypeAlias, TypeVar, final

from evenstep.core.checkpoints import checkpoints, newer, next_checkpoint, superseded
from evenstep.core.errors import CheckpointError
from evenstep.server.shard.snapshots import digest, patiently, sync

MANIFEST: Final = "manifest.json"
_PARTIAL: Final = ".partial-"
_Read = TypeVar("_Read")

Fingerprint: TypeAlias = dict[str, int | str]
"""A file's size and digest."""


class DamagedError(Exception):
    """A file of a checkpoint differs from what was written; the message names it."""


@final
class CheckpointFolder:
    """The checkpoints in one directory, which all workers see."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None

    def newest_first(self) -> list[str]:
        """The names of the checkpoints."""
        return checkpoints(read_of(self._names, "folder"))[::-1]

    def begin(self, known: int | None) -> str:
        """Create a new checkpoint and return its name; remove what an earlier writer did not finish.

        Args:
            known: The number of the newest checkpoint that this run has written or restored; 0 if it found none; None
                if it has done neither.

        Raises:
            CheckpointError: Another run writes here too.
            OSError: The disk is full, or the folder cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        names = self._names()
        foreign = None if known is None else newer(names, known)
        for name in names:
            if name.startswith(_PARTIAL):
                if _is_being_written(self.path / name):
                    foreign = name
                else:
                    shutil.rmtree(self.path / name, ignore_errors=True)
        if foreign is not None:
            raise CheckpointError(
                f"another run saves into {self.path} too, since {foreign} is not this one's: give each run its own"
                " folder"
            )
        name = next_checkpoint(names)
        self.partial(name).mkdir()
        self._lock = (self.partial(name) / MANIFEST).open("wb")
        with suppress(OSError):  # Not every file system supports locks.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return name

    def partial(self, name: str) -> Path:
        """Where a checkpoint is written before it gets its name."""
        return self.path / f"{_PARTIAL}{name}"

    def finish(self, name: str, manifest: Mapping[str, Any], *, keep: int) -> Path:
        """Give a written checkpoint its name, and remove those beyond the newest `keep`.

        Raises:
            OSError: As for `begin`. The older checkpoints are untouched.
        """
        partial, whole = self.partial(name), self.path / name
        write_durably(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
        for folder in [*(path for path in partial.rglob("*") if path.is_dir()), partial]:
            sync(folder)
        partial.rename(whole)
        sync(self.path)
        with suppress(OSError):  # Then there are more than need be, until the next one is written.
            spared = self.last_finite()
            for old in superseded(self._names(), keep):
                if old != spared:
                    shutil.rmtree(self.path / old, ignore_errors=True)
        return whole

    def last_finite(self) -> str | None:
        """The newest checkpoint whose manifest does not say that its weights are not finite.

        Raises:
            OSError: A manifest cannot be read now.
        """
        for name in self.newest_first():
            with suppress(DamagedError):
                if manifest_of(self.path / name).get("finite", True):
                    return name
        return None

    def way_back(self) -> str:
        """How to go on from the last checkpoint with finite weights; OSError as above."""
        last = self.last_finite()
        if last is None:
            return "no checkpoint has finite ones"
        return f"{last}, the last with finite ones, is kept; to go on from it, move those after it to another folder"

    def end(self, name: str) -> None:
        """Release the lock, and remove the checkpoint if it was not finished. May be called twice."""
        if self._lock is not None:
            shutil.rmtree(self.partial(name), ignore_errors=True)
            self._lock.close()
            self._lock = None

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self.path.iterdir()]
        except FileNotFoundError:
            return []


def _is_being_written(partial: Path) -> bool:
    """Whether its writer still holds the lock on its manifest."""
    try:
        with (partial / MANIFEST).open("rb+") as manifest:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def read_of(read: Callable[[], _Read], name: str, *, pause: float = 1.0) -> _Read:
    """What `read` returns, patiently.

    Raises:
        DamagedError: The file of this name is not there.
        OSError: It could not be read at any time.
    """
    try:
        return patiently(read, pause=pause)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise DamagedError(f"its {name} cannot be read ({error.strerror})") from error


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    path.write_bytes(content)
    sync(path)


def written_files(checkpoint: Path) -> list[str]:
    """The files of a checkpoint except its manifest, in the same order on every host."""
    found = (path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file())
    return sorted(name for name in found if name != MANIFEST)


def fingerprint(path: Path) -> Fingerprint:
    """The size and digest of a file."""
    return {"bytes": path.stat().st_size, "blake2b": digest(path)}


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint's manifest, with the fingerprints of its files.

    Raises:
        DamagedError: It is no manifest.
        OSError: It cannot be read now.
    """
    content = read_of(lambda: (checkpoint / MANIFEST).read_bytes(), MANIFEST)
    try:
        manifest = json.loads(content)
        return {**manifest, "files": dict(manifest["files"])}
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"its {MANIFEST} is none ({error})") from error


def require_whole(checkpoint: Path, files: Mapping[str, Fingerprint]) -> None:
    """Check that these files have their fingerprints.

    Raises:
        DamagedError: One has not.
        OSError: One cannot be read now.
    """
    for name, expected in files.items():
        found = read_of(partial(fingerprint, checkpoint / name), name)
        if found != expected:
            raise DamagedError(f"its {name} has other content than was written, or another length")
