"""The interpreters of frameworks that have environments of their own."""

import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]


def add_argument(parser):
    """Let interpreters be named: --python NAME=PATH."""
    parser.add_argument(
        "--python",
        type=lambda text: text.partition("=")[::2],
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="the interpreter of a framework (default: .venv-NAME/bin/python, which make test-all builds)",
    )


def named(options, names):
    """The path of each framework's interpreter; where they lie says nothing to the readers of the record."""
    sys.argv = [word for before, word in pairwise(["", *sys.argv]) if "--python" not in (before, word)]
    return {name: str(ROOT / f".venv-{name}/bin/python") for name in names} | dict(options.python)
