"""Open files that travel with a message; whoever holds them closes them."""

import contextlib
import os
from collections.abc import Iterable


def close_files(files: Iterable[int]) -> None:
    """Close these descriptors, whatever becomes of each."""
    for descriptor in files:
        with contextlib.suppress(OSError):
            os.close(descriptor)
