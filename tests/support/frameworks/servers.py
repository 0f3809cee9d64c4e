"""Parameter servers for workers in whose environment there is no PyTorch, which only the servers need."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest

from support.frameworks.table import is_installed
from support.frameworks.task import WORKERS

_PROGRAM = """
import json, sys
from contextlib import ExitStack

import evenstep

with ExitStack() as stack:
    started = [stack.enter_context(evenstep.start_servers(each, workers=int(sys.argv[1]))) for each in sys.argv[2:]]
    print(json.dumps([(each.addresses, each.secret) for each in started]), flush=True)
    sys.stdin.read()
"""


def torch_python():
    """An interpreter that has PyTorch: this one, or the one of the variable TORCH_PYTHON, which make test-all sets."""
    if is_installed("torch"):
        return sys.executable
    named = os.environ.get("TORCH_PYTHON")
    if named is None:
        pytest.skip("needs an interpreter with torch in TORCH_PYTHON: make test-all names one")
    return os.path.abspath(named)


@contextmanager
def servers(schemes):
    """The addresses and the secret of servers for each scheme."""
    command = [torch_python(), "-c", _PROGRAM, str(WORKERS), *schemes]
    with ExitStack() as stack:
        process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        stack.callback(process.stdin.close)  # It ends with its standard input.
        yield dict(zip(schemes, json.loads(process.stdout.readline()), strict=True))
