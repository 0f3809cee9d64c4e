"""Hands the servers' addresses and secret to the other workers of this host in a file that only this user can read.

torchrun's store listens on all addresses and has no authentication: any process that reaches its port can read and
write it. So the store carries only the file's name, and a worker uses the file only if no other user can have written
it and it belongs to this run.
"""

import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

import msgspec

from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown

_MAX_BYTES: Final = 1 << 16  # Several times the addresses of 128 servers.
_PRIVATE: Final = stat.S_IRUSR | stat.S_IWUSR


class Handover(msgspec.Struct, frozen=True, kw_only=True):
    """The data with which another worker reaches the servers.

    `secret` is in hexadecimal, and empty if every worker was given it. `run` identifies this run.
    """

    addresses: tuple[tuple[str, ...], ...]
    secret: str
    run: str

    def write(self, folder: Path) -> Path:
        """Write it into a new file in this folder, which only this user can open; return the file's path."""
        path = folder / "servers"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE)
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, _PRIVATE)  # The process's mask may have removed some of it.
                file.write(msgspec.json.encode(self))
        except OSError as error:
            raise _no_room(error) from error
        return path

    @classmethod
    def read(cls, path: str, run: str) -> Self:
        """Read the file of the first worker of this run; `path` comes from the store, which any process may write to.

        ConfigError if another user may have written the file, or it belongs to another run.
        """
        try:
            found = msgspec.json.decode(_content(path), type=cls)
            if found.run != run:
                raise _UntrustedError("it is of another run")
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            # The content is not shown: it may be any file of this user's.
            why = str(error) if isinstance(error, _UntrustedError) else type(error).__name__
            raise ConfigError(
                f"the file {shown(path)}, which the store of this run names for its servers, is not used ({why}):"
                " another process may write into the store, so use a network that you trust, or evenstep run"
            ) from None
        return found


def private_folder() -> "tempfile.TemporaryDirectory[str]":
    """Make a folder for the files of one run, which only this user can open."""
    try:
        return tempfile.TemporaryDirectory(prefix="evenstep-")
    except OSError as error:
        raise _no_room(error) from error


def run_of(environment: Mapping[str, str]) -> str:
    """Return what distinguishes this process's run from others on its host: where its workers meet, and which start."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    return " ".join(environment.get(name, "") for name in names)


class _UntrustedError(ValueError):
    """Another user may have written the file, or it is of another run."""


def _content(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _UntrustedError("it is not a regular file")
        if status.st_uid != os.geteuid():
            raise _UntrustedError("it belongs to another user")
        if stat.S_IMODE(status.st_mode) != _PRIVATE:
            raise _UntrustedError("others than its owner have access to it")
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise _UntrustedError("it is too large")
    return content


def _no_room(error: OSError) -> ConfigError:
    return ConfigError(
        f"the servers' addresses cannot be handed to the other workers in {tempfile.gettempdir()}"
        f" ({error.strerror}): make room, or set TMPDIR to another folder"
    )
