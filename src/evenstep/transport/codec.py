"""The frame of a message: a prefix of fixed size, the header, and the payload.

Every length is compared with its limit before memory is reserved for it.
"""

import contextlib
import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Self, final

from evenstep.transport.base import ConnectionLostError

VERSION: Final = 1
"""The version of the protocol, which both peers must have in common."""

MAX_FILES: Final = 16
_MAGIC: Final = b"EVST"
_PREFIX: Final = struct.Struct("!4sHHIQ")
PREFIX_BYTES: Final = _PREFIX.size


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of what a connection accepts. `patience_seconds`: how long a peer may pause in mid-message."""

    header_bytes: int = 2**16
    payload_bytes: int = 2**36
    patience_seconds: float = 60.0


DEFAULT_LIMITS: Final = Limits()


@final
class Prefix(NamedTuple):
    """The lengths of the header and the payload that follow, and the number of files."""

    header_bytes: int
    payload_bytes: int
    files: int

    def encode(self) -> bytes:
        """Encode as `PREFIX_BYTES` bytes."""
        return _PREFIX.pack(_MAGIC, VERSION, self.files, self.header_bytes, self.payload_bytes)

    @classmethod
    def decode(cls, encoded: memoryview | bytes, limits: Limits) -> Self:
        """Read `PREFIX_BYTES` bytes.

        Raises:
            ConnectionLostError: The prefix is invalid, of another version, or exceeds the limits.
        """
        magic, version, files, header_bytes, payload_bytes = _PREFIX.unpack(encoded)
        if magic != _MAGIC:
            raise ConnectionLostError(f"the peer sent {magic!r} instead of a message of evenstep")
        if version != VERSION:
            raise ConnectionLostError(
                f"the peer speaks version {version} of the protocol, this side {VERSION}: install the same evenstep"
            )
        if not 0 < header_bytes <= limits.header_bytes:
            raise ConnectionLostError(f"a header of {header_bytes} bytes: it must have 1 to {limits.header_bytes}")
        if payload_bytes > limits.payload_bytes:
            raise ConnectionLostError(
                f"a payload of {payload_bytes} bytes: it must have at most {limits.payload_bytes}"
            )
        if files > MAX_FILES:
            raise ConnectionLostError(f"a message with {files} files: it must have at most {MAX_FILES}")
        return cls(header_bytes=header_bytes, payload_bytes=payload_bytes, files=files)


def check_sendable(header: bytes, files: Sequence[int], limits: Limits = DEFAULT_LIMITS) -> None:
    """Raise ValueError if a message cannot have this header or this many files."""
    if not 0 < len(header) <= limits.header_bytes:
        raise ValueError(
            f"the header has {len(header)} bytes, not 1 to {limits.header_bytes}: send large values as payload"
        )
    if len(files) > MAX_FILES:
        raise ValueError(f"{len(files)} files in one message: send at most {MAX_FILES}")


def as_bytes(buffer: memoryview) -> memoryview:
    """View the buffer as bytes; ValueError if it is not contiguous."""
    if not buffer.c_contiguous:
        raise ValueError("the payload is not contiguous: make the array contiguous before sending or receiving it")
    if buffer.nbytes == 0:
        return memoryview(b"")
    return buffer.cast("B")


def writable(buffers: Sequence[memoryview]) -> list[memoryview]:
    """View the buffers as writable bytes; ValueError if one is read-only or not contiguous."""
    body = [as_bytes(buffer) for buffer in buffers]
    if any(buffer.readonly for buffer in body if buffer):
        raise ValueError("a payload cannot be read into read-only memory: give writable buffers")
    return body


def wrong_room(room: int, unread: int) -> ValueError:
    """Make the error for buffers of `room` bytes and a payload of `unread` bytes."""
    return ValueError(f"the buffers have {room} bytes, but the payload has {unread}: give buffers of exactly that size")


def close_files(files: Iterable[int]) -> None:
    """Close these descriptors, and ignore errors."""
    for descriptor in files:
        with contextlib.suppress(OSError):
            os.close(descriptor)
