"""What `evenstep run --find-batch` has found, in a file of the run directory, for the next start."""

import os
from pathlib import Path
from typing import Final, Self

import msgspec

from evenstep.core.errors import ConfigError
from evenstep.telemetry.regular import open_regular

FILE: Final = "found-batch.json"
_MAX_BYTES: Final = 16 << 20


class FoundWorker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker: its device, the largest batch that it held, and its speed with that.

    `identity` tells its device from others, in the next run too. `memory_bytes` is what it could have; None if unknown.
    `more`: it might hold more, which was not tried.
    """

    worker: int
    device: str
    identity: str
    memory_bytes: int | None
    holds: int
    more: bool
    samples_per_second: float


class FoundBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The largest batches of all workers. Sizes count average samples if samples differ in cost (`by_cost`).

    `global_batch_size` is the largest one whose parts, shared out by speed, all workers hold.
    """

    workers: tuple[FoundWorker, ...]
    global_batch_size: int
    by_cost: bool = False

    @property
    def together(self) -> int:
        """What all hold together."""
        return sum(each.holds for each in self.workers)

    def write(self, folder: Path) -> None:
        """Replace the file in this folder, which is made if need be."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{FILE}.new"
        path.write_bytes(msgspec.json.encode(self))
        path.replace(folder / FILE)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """What the file in this folder says; None if there is no file.

        Raises:
            ConfigError: The file is damaged.
        """
        path = folder / FILE
        if not os.path.exists(path):
            return None
        try:
            with open_regular(path) as file:
                return msgspec.json.decode(file.read(_MAX_BYTES), type=cls)
        except (OSError, ValueError) as error:  # A DecodeError is a ValueError.
            raise ConfigError(f"{path} cannot be read ({error}): run evenstep run --find-batch again") from error

    def holds_of(self, identity: str) -> int | None:
        """What the worker of this identity holds; None if there is none."""
        return next((each.holds for each in self.workers if each.identity == identity), None)
