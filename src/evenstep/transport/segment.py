"""Memory that two processes on one host share, through an open file without a name.

The size of such a segment is sealed, so that no peer can remove pages that another process reads. The system frees it
when no process has it open or mapped any more, however the processes end. A mapping lives as long as anything views it.
"""

import contextlib
import fcntl
import mmap
import os
import stat

from evenstep.core.errors import ProtocolError


def create_segment(nbytes: int) -> tuple[int, mmap.mmap]:
    """Make a segment of at least one byte, filled with zeros. Return the open file, which the caller closes, and a map.

    Raises:
        OSError: There is not enough memory.
    """
    descriptor = os.memfd_create("evenstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Reserved now: running out of memory later would end the process.
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _fixed_size() | fcntl.F_SEAL_SEAL)
        return descriptor, mmap.mmap(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise


def open_segment(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map the segment whose descriptor a peer has passed. The descriptor is closed.

    Raises:
        ProtocolError: The file has another size, or could still shrink.
    """
    try:
        _check(descriptor, nbytes)
        return mmap.mmap(descriptor, nbytes)
    finally:
        os.close(descriptor)


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
