"""argparse, with errors of one sentence instead of a page of usage."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest
from evenstep.telemetry.regular import open_regular

_MAX_SOURCE: Final = 1 << 20
"""Bytes of a script that are searched for the names of its options."""


def as_path(text: str) -> Path:
    """The type of an argument that is a path; an empty one would be the folder that one is in.

    Raises:
        ArgumentTypeError: It is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("needs a path, not an empty text")
    return Path(text)


def warn_of_misplaced(
    parser: argparse.ArgumentParser, arguments: Sequence[str], after: Sequence[str], script: str
) -> None:
    """Say which of the parser's options stand after the script, whose they therefore are.

    Nothing is said where a `--` tells that this is meant, nor of an option whose name stands in the script's source.

    Args:
        parser: Whose options.
        arguments: All that was given.
        after: What stands after the script.
        script: Its path, or another program's name.
    """
    known = {option for action in parser._actions for option in action.option_strings if action.dest != "help"}
    found = [name for name in dict.fromkeys(each.partition("=")[0] for each in after) if name in known]
    source = _source(script) if found else ""
    for name in found:
        if "--" not in arguments and name not in source:
            print(
                f"evenstep: {name} stands after {script}, which gets it: put it before {script} if it is meant for"
                f" {parser.prog}",
                file=sys.stderr,
            )


def _source(script: str) -> str:
    try:
        with open_regular(Path(script)) as file:
            return file.read(_MAX_SOURCE).decode(errors="replace")
    except OSError:
        return ""


class Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit; its help keeps the lines of its texts."""

    def __init__(
        self, *, prog: str, description: str, example: str, parents: tuple[argparse.ArgumentParser, ...] = ()
    ) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=parents,
            conflict_handler="resolve",
        )

    def error(self, message: str) -> NoReturn:
        """Raise what argparse has to say."""
        raise ConfigError(f"{message}: see {self.prog} --help")

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Parse all arguments.

        Raises:
            ConfigError: One is unknown (the message names the nearest), missing or malformed.
        """
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            name = unknown[0].partition("=")[0]
            hint = nearest(name, options) if name.startswith("--") else ""
            see = hint if hint.startswith("did") else f"see {self.prog} --help"
            raise ConfigError(f"{self.prog} has no argument {name!r}: {see}")
        return parsed
