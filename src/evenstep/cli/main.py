"""The command line's front door: finds the subcommand, and turns every error of ours into one sentence."""

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from evenstep import __version__
from evenstep.core.errors import ConfigError, EvenstepError
from evenstep.core.nearest import nearest

USAGE_ERROR = 2
INTERRUPTED = 130
OUTPUT_CLOSED = 1
"""Which is what rich ends with, too, where the reader of its output is gone."""
_LONGEST_NAME = 300
"""Letters of a file's name in a message."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Subcommand:
    """`run` takes the arguments after its name and returns the exit code."""

    summary: str
    run: Callable[[list[str]], int]


# A subcommand's module is imported when it is asked for: help needs neither torch nor the second that its import takes.


def _demo(arguments: list[str]) -> int:
    from evenstep.cli.demo import demo

    return demo(arguments)


def _export(arguments: list[str]) -> int:
    from evenstep.cli.export import run_export

    return run_export(arguments)


def _profile(arguments: list[str]) -> int:
    from evenstep.cli.profile import run_profile

    return run_profile(arguments)


def _report(arguments: list[str]) -> int:
    from evenstep.cli.report import run_report

    return run_report(arguments)


def _run(arguments: list[str]) -> int:
    from evenstep.cli.run import run

    return run(arguments)


def _simulate(arguments: list[str]) -> int:
    from evenstep.cli.simulate import run_simulate

    return run_simulate(arguments)


def _top(arguments: list[str]) -> int:
    from evenstep.cli.top import run_top

    return run_top(arguments)


SUBCOMMANDS = {
    "demo": Subcommand(summary="train on real data with a slow worker, and see what balancing gains", run=_demo),
    "export": Subcommand(summary="give a run's events to Perfetto, TensorBoard or Prometheus", run=_export),
    "profile": Subcommand(
        summary="measure a script's model on this device, as a table or a cluster file", run=_profile
    ),
    "report": Subcommand(summary="show what happened in runs, on one page that needs no network", run=_report),
    "run": Subcommand(summary="start a training script on several workers, under any scheme", run=_run),
    "simulate": Subcommand(
        summary="compare schemes on a cluster that you need not have, in virtual time", run=_simulate
    ),
    "top": Subcommand(summary="watch a run: who waits for whom, in this terminal", run=_top),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command with these arguments (by default the process's own) and return its exit code.

    2 means that something was asked for wrongly; a sentence on stderr says what to change.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        code = _dispatch(given)
        if sys.stdout is not None:
            sys.stdout.flush()  # While an error of it can still be told as one.
        return code
    except EvenstepError as error:
        print(f"evenstep: {error}", file=sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:  # As of `evenstep top --json | head`, which has read enough.
        _discard_output()
        return OUTPUT_CLOSED
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        what = "the output" if error.filename is None else str(error.filename)[:_LONGEST_NAME]
        print(f"evenstep: {what} cannot be used ({error.strerror}): give another", file=sys.stderr)
        _discard_output()
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("evenstep: interrupted", file=sys.stderr)
        return INTERRUPTED


def _discard_output() -> None:
    """Let the interpreter's own flush at its end find nothing to complain of."""
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
        return SUBCOMMANDS[name].run(arguments[1:])
    except SystemExit as ended:  # argparse, after it has printed help
        return ended.code if isinstance(ended.code, int) else 0


def _help() -> str:
    known = "\n".join(f"  {name:<8} {each.summary}" for name, each in SUBCOMMANDS.items())
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
