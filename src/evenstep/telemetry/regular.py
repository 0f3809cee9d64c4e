"""Opens files that users name."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


class NotRegularError(OSError):
    """The file is not a regular file."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading: a pipe could block for ever, and a device may have no end.

    Raises:
        OSError: The file is not a regular file, or cannot be opened; `strerror` says which.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, *, most_bytes: int = 64 << 20) -> bytes:
    """The contents of a regular file, which has to fit in memory.

    Raises:
        OSError: As in `open_regular`, or the file has more than `most_bytes`.
    """
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes >> 20} MB", str(path))
    return content
