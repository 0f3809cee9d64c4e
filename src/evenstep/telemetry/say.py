"""Messages of a run for the terminal, a line at a time."""

import sys


def say(text: str) -> None:
    """Write `evenstep: <text>` to standard error, newline included, in one write.

    The launcher, its servers and all workers share that pipe. With `PYTHONUNBUFFERED`, usual in containers, `print`
    writes its newline separately, so that another process's line could come between.
    """
    sys.stderr.write(f"evenstep: {text}\n")
    sys.stderr.flush()
