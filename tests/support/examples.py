"""Runs an example in a worker process that has imported torch already."""

import io
import runpy
import sys
from contextlib import redirect_stdout


def run(path, options):
    """What the script prints, started with these options."""
    sys.argv = [path, *options]
    printed = io.StringIO()
    with redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()
