"""A folder of checkpoints. Each one is written under another name, and renamed once it is complete and on the disk.

This module knows files and their digests, but not their meaning.
"""

import fcntl
import json
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, TypeAlias, TypeVar, final

from evenstep.core.checkpoints import checkpoints, next_checkpoint, number_of
from evenstep.core.errors import CheckpointError
from evenstep.server.shard.snapshots import digest, patiently, sync

_MANIFEST: Final = "manifest.json"
_PARTIAL: Final = ".partial-"
_Read = TypeVar("_Read")

Fingerprint: TypeAlias = dict[str, int | str]
"""A file's size and digest."""


class DamagedError(Exception):
    """A file of a checkpoint differs from what was written; the message names it."""


@final
class CheckpointFolder:
    """The checkpoints in one directory, which all workers see.

    Attributes:
        path: The directory.
        known: The number of the newest checkpoint that this run has written or restored; 0 if it found none; None if
            it has done neither.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: int | None = None
        self._begun: Path | None = None
        self._lock: IO[bytes] | None = None

    def newest_first(self) -> list[str]:
        """Return the names of the checkpoints; OSError if they cannot be read."""
        return checkpoints(patiently(self._names))[::-1]

    def begin(self) -> str:
        """Create a new checkpoint and return its name; remove what an earlier writer did not finish.

        Raises:
            CheckpointError: Another run writes here too.
            OSError: The disk is full, or the folder cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        names = self._names()
        foreign = [] if self.known is None else [each for each in checkpoints(names) if number_of(each) > self.known]
        for partial in (self.path / name for name in names if name.startswith(_PARTIAL)):
            if _is_being_written(partial):
                foreign.append(partial.name)
            else:
                shutil.rmtree(partial, ignore_errors=True)
        if foreign:
            raise CheckpointError(
                f"another run saves into {self.path} too, since {foreign[-1]} is not this one's: give each run its own"
                " folder"
            )
        name = next_checkpoint(names)
        self.partial(name).mkdir()
        self._begun = self.partial(name)
        self._lock = (self._begun / _MANIFEST).open("wb")
        with suppress(OSError):  # Not every file system supports locks.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return name

    def partial(self, name: str) -> Path:
        """Return where a checkpoint is written before it gets its name."""
        return self.path / f"{_PARTIAL}{name}"

    def finish(self, name: str, manifest: Mapping[str, Any], *, keep: int) -> None:
        """Give a written checkpoint its name, and remove those beyond the newest `keep`.

        Raises:
            OSError: As for `begin`. The older checkpoints are untouched.
        """
        partial = self.partial(name)
        (partial / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        sync(partial / _MANIFEST)
        sync(partial)
        partial.rename(self.path / name)
        # Even if an error follows: the next save must not take it for another run's.
        self.known = number_of(name)
        self.abandon()
        sync(self.path)
        with suppress(OSError):  # If it fails, too many stay until the next one is written.
            spared = self.last_finite()
            for old in checkpoints(self._names())[:-keep]:
                if old != spared:
                    shutil.rmtree(self.path / old, ignore_errors=True)

    def abandon(self) -> None:
        """Release the lock, and remove an unfinished checkpoint."""
        if self._begun is not None:
            shutil.rmtree(self._begun, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
        self._begun = self._lock = None

    def last_finite(self) -> str | None:
        """Return the newest checkpoint whose manifest does not say that its weights are not finite.

        Raises:
            OSError: A manifest cannot be read now.
        """
        for name in self.newest_first():
            with suppress(DamagedError):
                if manifest_of(self.path / name).get("finite", True):
                    return name
        return None

    def not_finite(self, name: str) -> str:
        """Return the warning about a checkpoint whose weights are not finite, with a way to go on; OSError as above."""
        last, found = self.last_finite(), f"the weights of {name} hold a NaN or an infinity"
        if last is None:
            return f"{found}: no checkpoint has finite ones"
        return (
            f"{found}: {last}, the last with finite ones, is kept; to go on from it, move those after it to another"
            " folder"
        )

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self.path.iterdir()]
        except FileNotFoundError:
            return []


def _is_being_written(partial: Path) -> bool:
    """True if its writer still holds the lock on its manifest."""
    try:
        with (partial / _MANIFEST).open("rb+") as manifest:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def read_of(path: Path, read: Callable[[Path], _Read], *, pause: float = 1.0) -> _Read:
    """Read a file with `read`, and retry for a while after errors that may pass.

    Raises:
        DamagedError: There is no such file, or something else in its place, such as a directory or a pipe.
        OSError: No try could read it.
    """

    def read_file() -> _Read:
        if not stat.S_ISREG(path.stat().st_mode):  # Opening a pipe would wait for its writer.
            raise DamagedError(f"its {path.name} is not a file")
        return read(path)

    try:
        return patiently(read_file, pause=pause)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError(f"its {path.name} cannot be read ({error.strerror})") from error


def fingerprint(path: Path) -> Fingerprint:
    """Return the size and digest of a file."""
    return {"bytes": path.stat().st_size, "blake2b": digest(path)}


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's manifest, with the fingerprints of its `files`.

    Raises:
        DamagedError: It is not a manifest, or names no files.
        OSError: It cannot be read now.
    """
    content = read_of(checkpoint / _MANIFEST, Path.read_bytes)
    try:
        manifest = json.loads(content)
        files = dict(manifest["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"its {_MANIFEST} is none ({error})") from error
    if not files:
        raise DamagedError(f"its {_MANIFEST} is none (it names no files)")
    return {**manifest, "files": files}


def require_whole(checkpoint: Path, files: Mapping[str, Fingerprint]) -> None:
    """Check that these files have their fingerprints.

    Raises:
        DamagedError: A file does not have its fingerprint.
        OSError: A file cannot be read now.
    """
    for name, expected in files.items():
        if read_of(checkpoint / name, fingerprint) != expected:
            raise DamagedError(f"its {name} has other content than was written, or another length")
