"""What a run tells the person at its terminal, a line at a time."""

import sys

__all__ = ["say"]


def say(text: str) -> None:
    """Write `evenstep: <text>` to standard error.

    The launcher, its servers and all workers share that pipe. `print` writes its newline by itself where Python does
    not buffer (`PYTHONUNBUFFERED`, usual in containers), and another program's line then comes between.
    """
    sys.stderr.write(f"evenstep: {text}\n")
    sys.stderr.flush()
