"""Parses arguments and checks what they name; every error is one sentence instead of a page of usage."""

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NoReturn

from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest
from evenstep.telemetry.regular import open_regular

_MAX_SOURCE: Final = 1 << 20
"""Bytes of a script that are searched for the names of its options."""

_PACKAGES: Final = {
    "torch": "PyTorch: pip install 'evenstep[{}]', or install the build for your device (https://pytorch.org)",
    "plotly": "plotly for its page: pip install 'evenstep[{}]'",
}


def as_path(text: str) -> Path:
    """The type of an argument that is a path; an empty text, which would be the working directory, is refused."""
    if not text:
        raise argparse.ArgumentTypeError("needs a path, not an empty text")
    return Path(text)


def warn_of_misplaced(
    parser: argparse.ArgumentParser, arguments: Sequence[str], after: Sequence[str], script: str
) -> None:
    """Warn of options of the parser that stand after the script, which therefore gets them.

    There is no warning if a `--` among all the arguments says that this is meant, or if the option's name is in the
    script's source.
    """
    known = {option for action in parser._actions for option in action.option_strings if action.dest != "help"}
    found = [name for name in dict.fromkeys(each.partition("=")[0] for each in after) if name in known]
    if not found or "--" in arguments:
        return
    source = _source(script)
    for name in found:
        if name not in source:
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
    """Raises ConfigError where argparse would print its usage and exit; its help keeps the line breaks of its texts."""

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
        """Raise argparse's message."""
        raise ConfigError(f"{message}: see {self.prog} --help")

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Parse all arguments; ConfigError if one is unknown (the message names the nearest), missing or malformed.

        If a positional takes the script's arguments (argparse.REMAINDER), all that stand after the script are the
        script's. argparse alone would also compare them with this parser's options, and refuse an ambiguous one.
        """
        rest = [action.dest for action in self._actions if action.nargs == argparse.REMAINDER]
        after = self._script_at(arguments) + 1 if rest else len(arguments)
        parsed, unknown = self.parse_known_args(arguments[:after])
        for dest in rest:
            own = arguments[after:]
            # The first -- is not the script's, as under torchrun.
            setattr(parsed, dest, own[1:] if own[:1] == ["--"] and "--" not in arguments[:after] else own)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            name = unknown[0].partition("=")[0]
            hint = nearest(name, options) if name.startswith("--") else ""
            see = hint if hint.startswith("did") else f"see {self.prog} --help"
            raise ConfigError(f"{self.prog} has no argument {name!r}: {see}")
        return parsed

    def _script_at(self, arguments: list[str]) -> int:
        """The place of the first argument that is neither an option nor an option's value."""
        place = 0
        while place < len(arguments):
            if arguments[place] == "--":
                return place + 1
            if not arguments[place].startswith("-") or arguments[place] == "-":
                return place
            place += 2 if self._takes_next(arguments[place]) else 1
        return place

    def _takes_next(self, option: str) -> bool:
        """Whether an option, which may be abbreviated, has the next argument as its value."""
        actions = self._option_string_actions
        if option in actions:
            return actions[option].nargs is None
        meant = {id(action): action for name, action in actions.items() if name.startswith(option)}
        return option.startswith("--") and len(meant) == 1 and next(iter(meant.values())).nargs is None


def require_package(subcommand: str, package: str, extra: str) -> None:
    """Refuse if a package is missing that this extra of evenstep installs."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"evenstep {subcommand} needs {_PACKAGES[package].format(extra)}")


def require_run_dir(path: Path) -> None:
    """Refuse a run directory that does not exist."""
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}: give the --run-dir of a run")


def require_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before the work for it; an existing one keeps its content."""
    there = os.path.lexists(path)
    write_text(path, "", mode="a")
    if not there:
        path.unlink()


def write_text(path: Path, text: str, *, mode: Literal["w", "a"] = "w") -> None:
    """Write a file; ConfigError if that is not possible."""
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}): give another path") from error
