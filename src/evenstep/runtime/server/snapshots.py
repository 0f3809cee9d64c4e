"""Snapshots of a run on disk: one file per shard and version, each written whole or not at all."""

import re
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, final

import torch

from evenstep.core.errors import ConfigError
from evenstep.runtime.durable import sync

KEPT: Final = 2
"""Complete snapshots that stay on disk."""

_FOLDER: Final = re.compile(r"version-(\d{12})")


@final
class Snapshots:
    """The snapshots of a run of `count` shards in one directory. One is complete when every shard has written its file.

    A thread sees to it that what was written is on the disk before it takes its name.

    Args:
        directory: Made where it does not exist, with the first snapshot.
        count: The shards of the run.
    """

    def __init__(self, directory: Path, count: int) -> None:
        self._directory = directory
        self._count = count
        self._last: threading.Thread | None = None

    def write(self, version: int, shard: int, state: Mapping[str, Any]) -> None:
        """Write one shard's file; a reader finds it whole or not at all, and soon.

        Raises:
            OSError: The disk is full, say; what was there before is untouched.
        """
        self.wait()
        folder = self._directory / f"version-{version:012}"
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".shard-{shard}.partial"
        try:
            with partial.open("wb") as file:
                torch.save(dict(state), file)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        # The disk may take long, and nobody need wait for it.
        finishing = threading.Thread(target=self._finish, args=(partial, folder / f"shard-{shard}.pt"))
        finishing.start()
        self._last = finishing

    def wait(self) -> None:
        """Until what was written last has its name."""
        if self._last is not None:
            self._last.join()

    def _finish(self, partial: Path, path: Path) -> None:
        sync(partial)
        partial.replace(path)
        sync(path.parent)
        self._prune()

    def latest(self) -> int | None:
        """The newest version of which every shard has written its part; None where there is none."""
        complete = self._complete()
        return complete[-1] if complete else None

    def read(self, version: int, shard: int) -> dict[str, Any]:
        """One shard's part.

        Raises:
            ConfigError: The file is damaged.
        """
        path = self._directory / f"version-{version:012}" / f"shard-{shard}.pt"
        try:
            # Plain values and tensors only: nothing in the file can run code.
            state: dict[str, Any] = torch.load(path, weights_only=True)
        except Exception as error:  # torch raises whatever the damage leads to.
            raise ConfigError(
                f"the snapshot {path} cannot be read ({error}): delete its folder to use the one before"
            ) from error
        return state

    def _complete(self) -> list[int]:
        found = []
        for folder in self._directory.glob("version-*"):
            match = _FOLDER.fullmatch(folder.name)
            if match and all((folder / f"shard-{shard}.pt").exists() for shard in range(self._count)):
                found.append(int(match[1]))
        return sorted(found)

    def _prune(self) -> None:
        for version in self._complete()[:-KEPT]:
            with suppress(OSError):  # Another shard may do the same at this moment.
                shutil.rmtree(self._directory / f"version-{version:012}")
