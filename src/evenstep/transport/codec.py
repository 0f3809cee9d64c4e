"""What a message looks like as bytes: a prefix of fixed size, a msgpack header, and the payload as it is.

Every length is compared with its limit before anything is made from it; a header becomes plain values only, never
objects of a class that the peer names.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn, Self, final

import msgpack  # type: ignore[import-untyped] # ships no types

from evenstep.transport.base import ConnectionLostError, Header

VERSION: Final = 1
"""Of the protocol: both ends must speak the same."""

MAX_FILES: Final = 16
"""How many open files one message can carry."""

_MAGIC: Final = b"EVST"
_PREFIX: Final = struct.Struct("!4sHHIQ")
PREFIX_BYTES: Final = _PREFIX.size
# The unpacker makes a list as soon as it has read its length, and lists nest 1024 deep: this bounds what a header of a
# few kilobytes can make it reserve to some 30 MB.
_MAX_ENTRIES: Final = 4096
_KEYS: Final = frozenset({str})


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a connection accepts: bytes of header and of payload, and seconds of silence in the middle of a message.

    The same patience holds for a peer that does not take in what is sent to it.
    """

    header_bytes: int = 2**16
    payload_bytes: int = 2**36
    patience_seconds: float = 60.0


DEFAULT_LIMITS: Final = Limits()


@final
class Prefix(NamedTuple):
    """What stands before a header: how many bytes of header and of payload follow, and how many files go with them.

    A tuple, since it is made for every message, which a frozen dataclass makes dearer by a tenth.
    """

    header_bytes: int
    payload_bytes: int
    files: int

    def encode(self) -> bytes:
        """The `PREFIX_BYTES` bytes of it."""
        return _PREFIX.pack(_MAGIC, VERSION, self.files, self.header_bytes, self.payload_bytes)

    @classmethod
    def decode(cls, encoded: memoryview | bytes, limits: Limits) -> Self:
        """Read `PREFIX_BYTES` bytes.

        Raises:
            ConnectionLostError: They are no prefix of this version, or announce more than the limits allow.
        """
        magic, version, files, header_bytes, payload_bytes = _PREFIX.unpack(encoded)
        if magic != _MAGIC:
            raise ConnectionLostError(f"the peer sent {magic!r} where a message of evenstep must begin")
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


def encode_header(header: Header, limits: Limits = DEFAULT_LIMITS) -> bytes:
    """The header as msgpack.

    Raises:
        ValueError: It holds something else than plain values, nests too deep, or is longer than the limit.
    """
    try:
        encoded: bytes = msgpack.packb(header)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"the header {header!r} holds what msgpack cannot carry ({error}): use plain values"
        ) from error
    if len(encoded) > limits.header_bytes:
        raise ValueError(
            f"the header has {len(encoded)} bytes, more than {limits.header_bytes}: send what is large as payload"
        )
    return encoded


def decode_header(encoded: memoryview | bytes) -> Header:
    """Read a header.

    Raises:
        ConnectionLostError: The bytes are not exactly one msgpack map of plain values with strings as keys.
    """
    try:
        # Strings and bytes are bounded by what has arrived: they have no place to be longer.
        header = msgpack.unpackb(
            encoded,
            raw=False,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_ext_len=0,
            max_array_len=_MAX_ENTRIES,
            max_map_len=_MAX_ENTRIES,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise ConnectionLostError(
            f"the peer sent a header that is not msgpack: {error or type(error).__name__}"
        ) from error
    if not isinstance(header, dict) or not {*map(type, header)} <= _KEYS:
        raise ConnectionLostError("the peer sent a header that is not a map with strings as keys")
    return header


def as_bytes(buffer: memoryview) -> memoryview:
    """The buffer as plain bytes, without a copy.

    Raises:
        ValueError: Its elements do not lie one behind another.
    """
    if not buffer.c_contiguous:
        raise ValueError("a payload must lie in one piece: make the array contiguous before sending or receiving it")
    if buffer.nbytes == 0:
        return memoryview(b"")
    return buffer.cast("B")


def writable(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The buffers as plain bytes that a payload can be read into.

    Raises:
        ValueError: One cannot be written, or its elements do not lie one behind another.
    """
    body = [as_bytes(buffer) for buffer in buffers]
    if any(buffer.readonly for buffer in body if buffer):
        raise ValueError("a payload cannot be read into memory that is read-only: give writable buffers")
    return body


def wrong_room(room: int, unread: int) -> ValueError:
    """What to raise where a payload does not fill the buffers given for it exactly; sizes in bytes."""
    return ValueError(f"the buffers have {room} bytes, but {unread} bytes of payload wait: give room for exactly those")


def require_few(files: Sequence[int]) -> None:
    """ValueError where one message cannot carry so many files."""
    if len(files) > MAX_FILES:
        raise ValueError(f"{len(files)} files in one message: send at most {MAX_FILES}")


def _refuse_extension(code: int, data: Any) -> NoReturn:  # noqa: ANN401 - what msgpack hands over
    raise ValueError(f"it holds the extension type {code}")
