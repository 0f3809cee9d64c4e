"""Messages of a run for the terminal, one line at a time."""

import sys


def say(text: str) -> None:
    """Write `evenstep: <text>` with its newline to standard error, in one write.

    The launcher, its servers and all workers share that pipe. With `PYTHONUNBUFFERED`, usual in containers, `print`
    writes its newline separately, and another process's line could come in between.
    """
    sys.stderr.write(f"evenstep: {text}\n")
    sys.stderr.flush()
