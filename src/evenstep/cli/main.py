"""The command line's entry point: finds the subcommand, and turns every error of ours into one sentence."""

import errno
import importlib
import os
import sys
from contextlib import suppress
from typing import Final

from evenstep import __version__
from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.core.nearest import nearest
from evenstep.core.shown import printable
from evenstep.launch.run_failed import RunFailedError

USAGE_ERROR = 2
INTERRUPTED = 130

SUBCOMMANDS: Final = {
    "demo": "train on real data with a slow worker, and see what balancing gains",
    "export": "give a run's events to Perfetto, TensorBoard, Prometheus or OpenTelemetry",
    "plan": "say which scheme is best on these machines, and what it gains",
    "report": "show what happened in runs, on one page that needs no network",
    "run": "start a training script on several workers, under any scheme",
    "simulate": "compare schemes on a cluster that you need not have, in virtual time",
    "top": "watch a run: who waits for whom, in this terminal",
}
"""Each is a module beside this one, whose `main` takes the arguments after the name and returns the exit code."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command with these arguments (by default the process's own) and return its exit code.

    2 means that the arguments are wrong; a sentence on stderr says what to change. A run that failed ends with the exit
    code of its first failure.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        code = _dispatch(given)
        if sys.stdout is not None:
            sys.stdout.flush()  # While an error can still be reported.
        return code
    except EvenstepError as error:
        print(f"evenstep: {printable(str(error))}", file=sys.stderr)
        return error.exit_code if isinstance(error, RunFailedError) else USAGE_ERROR
    except BrokenPipeError:  # As in `evenstep top --json | head`, which has read enough.
        _discard_output()
        return 1  # Like rich, when the reader of its output is gone.
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        what = "the output" if error.filename is None else printable(str(error.filename)[:300])
        print(f"evenstep: {what} cannot be used ({error.strerror}): give another", file=sys.stderr)
        _discard_output()
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("evenstep: interrupted", file=sys.stderr)
        return INTERRUPTED


def _discard_output() -> None:
    """Make the interpreter's flush at its end succeed."""
    with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name in ("-V", "--version"):
        print(f"evenstep {__version__}")
        return 0
    if name not in SUBCOMMANDS:
        raise ConfigError(f"there is no subcommand {name!r}: {nearest(name, SUBCOMMANDS)}")
    try:
        # Only the module that is needed: help needs neither torch nor the second that its import takes.
        return int(importlib.import_module(f"evenstep.cli.{name}").main(arguments[1:]))
    except SystemExit as ended:  # argparse, after it has printed help
        return ended.code if isinstance(ended.code, int) else 0


def _help() -> str:
    known = "\n".join(f"  {name:<10} {summary}" for name, summary in SUBCOMMANDS.items())
    return (
        "usage: evenstep SUBCOMMAND ...\n\n"
        "Distributed training that does not wait for its slowest worker.\n\n"
        f"subcommands:\n{known}\n\n"
        "options:\n  -h, --help\n  --version\n\n"
        "evenstep SUBCOMMAND --help says more about each.\n\n"
        "example:\n  evenstep demo"
    )


if __name__ == "__main__":
    sys.exit(main())
