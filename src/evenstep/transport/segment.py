"""Memory that two processes on one host share, through an open file without a name."""

import contextlib
import fcntl
import mmap
import os
import stat
from typing import Self, final

from evenstep.core.errors import ProtocolError


@final
class Segment:
    """Shared memory. Its size is sealed, so that no peer can remove pages that another process reads.

    The system frees it when no process has it open or mapped any more, however the processes end.

    Attributes:
        view: The content.
        descriptor: The open file to pass to the other process; -1 if the segment came from another process.
        nbytes: The size.
    """

    def __init__(self, descriptor: int, nbytes: int) -> None:
        try:
            mapping = mmap.mmap(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._mapping = mapping
        self.view = memoryview(mapping)
        self.descriptor = descriptor
        self.nbytes = nbytes
        self._closed = False

    @classmethod
    def create(cls, nbytes: int) -> Self:
        """Make a segment of at least one byte, filled with zeros.

        Raises:
            OSError: There is not enough memory.
        """
        return cls(_create(nbytes), nbytes)

    @classmethod
    def open(cls, descriptor: int, nbytes: int) -> Self:
        """Open the segment whose descriptor a peer has passed. The descriptor is closed.

        Raises:
            ProtocolError: The file has another size, or could still shrink.
        """
        try:
            _check(descriptor, nbytes)
        except BaseException:
            os.close(descriptor)
            raise
        segment = cls(descriptor, nbytes)
        segment.close_descriptor()
        return segment

    def close_descriptor(self) -> None:
        """Close the file; the memory stays. Calling this twice is harmless."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def close(self) -> None:
        """Free the memory, now or with the last array that views it. Calling this twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self.close_descriptor()
        with contextlib.suppress(BufferError):
            self.view.release()
            self._mapping.close()
        # Only remaining views may keep the mapping alive.
        self.view = memoryview(b"")
        del self._mapping

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _create(nbytes: int) -> int:
    """Make an open file without a name. Its memory is reserved: running out of it later would end the process."""
    descriptor = os.memfd_create("evenstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _fixed_size() | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(descriptor: int, nbytes: int) -> None:
    status, seals = os.fstat(descriptor), 0
    if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes or nbytes < 1:
        raise ProtocolError(
            f"the peer passed a file of {status.st_size} bytes as a segment of {nbytes}: both must have the same layout"
        )
    with contextlib.suppress(OSError):  # Only memory can be sealed.
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    if seals & _fixed_size() != _fixed_size():
        raise ProtocolError("the peer passed a segment that can still shrink")


def _fixed_size() -> int:
    """The seals of a file that nobody can resize. Only Linux has them; elsewhere no peer passes a file."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
