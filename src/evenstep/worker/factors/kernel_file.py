"""Files of /proc and of control groups, read again and again."""

import os
from pathlib import Path
from typing import final


@final
class KernelFile:
    """A small file that is written anew for each reading; kept open, because opening it costs more than reading it.

    Args:
        path: The file; it need not exist.
        largest: No more bytes than this are read.
    """

    def __init__(self, path: Path, largest: int = 4096) -> None:
        self._largest = largest
        try:
            self._file: int | None = os.open(path, os.O_RDONLY)
        except OSError:
            self._file = None

    @property
    def is_open(self) -> bool:
        """Whether there is such a file, and this worker may read it."""
        return self._file is not None

    def read(self) -> bytes:
        """What stands there now; nothing where it cannot be read, or no longer can."""
        if self._file is None:
            return b""
        try:
            return os.pread(self._file, self._largest, 0)
        except OSError:
            return b""

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def number(text: bytes, name: bytes) -> int | None:
    """The number behind the first place where that name stands, as in `MemTotal: 12 kB`; None where there is none.

    >>> number(b"MemTotal: 12 kB", b"MemTotal")
    12
    """
    at = text.find(name)
    if at < 0:
        return None
    end = at + len(name)
    words = text[end : end + 80].lstrip(b" \t:").split(None, 1)
    return int(words[0]) if words and words[0].isdigit() else None
