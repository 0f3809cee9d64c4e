"""Snapshots of a run on disk: one file per shard and version, each complete or absent."""

import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar, final

import torch

from evenstep.core.errors import ConfigError
from evenstep.telemetry.regular import NotRegularError, open_regular, read_regular

KEPT: Final = 2
"""The number of complete snapshots that stay on disk."""

_TRIES: Final = 5
_Read = TypeVar("_Read")
_FOLDER: Final = re.compile(r"version-(\d{12})")


@final
class Snapshots:
    """The snapshots of a run in one directory. A snapshot is complete when every shard has written its file.

    A thread writes one file at a time, so that training does not wait for the disk.

    Args:
        directory: Created with the first snapshot if it does not exist.
        count: The number of shards.
    """

    def __init__(self, directory: Path, count: int) -> None:
        self._directory = directory
        self._count = count
        self._last: threading.Thread | None = None

    def write(self, version: int, shard: int, state: Mapping[str, Any], told: Callable[[str | None], None]) -> None:
        """Start writing one shard's file, after waiting for the file before. Readers see a complete file or none.

        The caller must not change the state from now on. The writing thread calls `told` with None once the file is on
        the disk and has its name, or with the reason why it could not be written. Older files are untouched then.
        """
        self.wait()
        arguments = (version, shard, state, told)
        writing = threading.Thread(target=self._write, args=arguments, name="evenstep-snapshot")
        writing.start()
        self._last = writing

    @property
    def busy(self) -> bool:
        """True while a file is being written."""
        return self._last is not None and self._last.is_alive()

    def wait(self) -> None:
        """Wait until no file is being written."""
        if self._last is not None:
            self._last.join()

    def _write(self, version: int, shard: int, state: Mapping[str, Any], told: Callable[[str | None], None]) -> None:
        folder = self._directory / f"version-{version:012}"
        partial = folder / f".shard-{shard}.partial"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                torch.save(dict(state), file)
            sync(partial)
            sidecar = folder / f"shard-{shard}.json"
            sidecar.write_text(json.dumps({"servers": self._count, "blake2b": digest(partial)}))
            sync(sidecar)
            partial.replace(folder / f"shard-{shard}.pt")
            sync(folder)
        except Exception as error:  # torch raises its own errors if the disk is full.
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            told(str(error).partition("\n")[0])
        else:
            with suppress(OSError):  # If it fails, old snapshots stay.
                self._prune()
            told(None)

    def latest(self, damaged: Callable[[str], None]) -> int | None:
        """Return the newest version with the whole files of all shards; None if no file was ever complete.

        Args:
            damaged: Called with each version that is skipped because a file differs from what was written.

        Raises:
            ConfigError: No version is whole, they are of another number of servers, or they cannot be read.
        """
        try:
            return self._latest(damaged)
        except OSError as error:
            raise ConfigError(f"the snapshots in {self._directory} cannot be read: {error}") from error

    def _latest(self, damaged: Callable[[str], None]) -> int | None:
        for sidecar in self._directory.glob("version-*/shard-*.json"):
            servers = _told(sidecar).get("servers", self._count)
            if servers != self._count:
                raise ConfigError(
                    f"the snapshots in {self._directory} are of {servers} servers, and {self._count} were started:"
                    f" resume with servers={servers}"
                )
        complete = self._complete()
        for version in reversed(complete):
            odd = [shard for shard in range(self._count) if not self._whole(version, shard)]
            if not odd:
                return version
            damaged(f"the snapshot {self._file(version, odd[0])} is damaged and left out")
        if complete:
            raise ConfigError(f"no snapshot in {self._directory} is whole: give another run directory to start over")
        return None

    @property
    def newest(self) -> int:
        """Return the newest version whose files all have their names, damaged or not; -1 if there is none."""
        return max(self._complete(), default=-1)

    def make_room(self, version: int) -> None:
        """Remove files of this version, which an earlier run left when it ended before all were written.

        Together with a file of this run they would look like a snapshot.
        """
        for file in (self._directory / f"version-{version:012}").glob("shard-*"):
            with suppress(OSError):  # If it cannot be removed, none can be written either.
                file.unlink()

    def _whole(self, version: int, shard: int) -> bool:
        file = self._file(version, shard)
        written = {"servers": self._count, "blake2b": patiently(lambda: digest(file))}
        return _told(file.with_suffix(".json")) == written

    def read(self, version: int, shard: int) -> dict[str, Any]:
        """Read one shard's state; ConfigError if the file is damaged."""
        path = self._file(version, shard)
        try:
            # With weights_only, nothing in the file can run code.
            state: dict[str, Any] = patiently(lambda: torch.load(path, weights_only=True))
        except Exception as error:  # torch raises whatever the damage leads to.
            raise ConfigError(
                f"the snapshot {path} cannot be read ({error}): delete its folder to use the one before"
            ) from error
        return state

    def _file(self, version: int, shard: int) -> Path:
        return self._directory / f"version-{version:012}" / f"shard-{shard}.pt"

    def _complete(self) -> list[int]:
        def complete() -> list[int]:
            # Not glob, which finds nothing where it may not look.
            versions = [int(match[1]) for name in os.listdir(self._directory) if (match := _FOLDER.fullmatch(name))]
            return sorted(each for each in versions if all(self._file(each, n).exists() for n in range(self._count)))

        with suppress(FileNotFoundError, NotADirectoryError):
            return patiently(complete)
        return []

    def _prune(self) -> None:
        for version in self._complete()[:-KEPT]:
            with suppress(OSError):  # Another shard may do the same at this moment.
                shutil.rmtree(self._directory / f"version-{version:012}")


def _told(sidecar: Path) -> dict[str, Any]:
    """Read the record made of a file when it was written; empty if the record is damaged or gone."""
    try:
        return dict(json.loads(patiently(lambda: read_regular(sidecar))))
    except (FileNotFoundError, ValueError, TypeError):
        return {}


def patiently(read: Callable[[], _Read], *, pause: float = 1.0) -> _Read:
    """Return what `read` returns. Errors that may pass are retried, with `pause` seconds in between.

    Raises:
        OSError: No try could read it, or the file is missing or not a regular file.
    """
    for _ in range(_TRIES - 1):
        try:
            return read()
        except (FileNotFoundError, NotADirectoryError, NotRegularError):
            raise
        except OSError:
            time.sleep(pause)
    return read()


def digest(path: Path) -> str:
    """Return the BLAKE2 digest of a file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
