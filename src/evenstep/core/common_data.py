"""Checksums of a few samples, which show whether a worker has other samples than the rest."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from numpy.typing import NDArray


def bytes_of(array: NDArray[Any]) -> bytes:
    """An array's dtype, shape and bytes if it holds numbers; empty for other arrays, which cannot be compared."""
    return f"{array.dtype}{array.shape}".encode() + array.tobytes() if array.dtype.kind in "biufc" else b""


def checksum(parts: Iterable[bytes]) -> int:
    """The checksum of all parts; 0 if there are none."""
    found = 0
    for part in parts:
        found = zlib.crc32(part, found)
    return found


def unlike(checksums: Sequence[int]) -> tuple[int, int] | None:
    """The first worker whose samples differ from an earlier worker's, and that earlier worker; None if all are alike.

    A checksum of 0 means that the samples cannot be compared, and counts as like all others.
    """
    known = [rank for rank, each in enumerate(checksums) if each]
    return next(((rank, known[0]) for rank in known if checksums[rank] != checksums[known[0]]), None)
