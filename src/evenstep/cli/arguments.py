"""Parses arguments and checks what they name; every error is one sentence instead of a page of usage."""

import argparse
import importlib.util
import os
from pathlib import Path
from typing import Literal, NoReturn

from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest


def as_path(text: str) -> Path:
    """Convert an argument that is a path; an empty text, which would be the working directory, is refused."""
    if not text:
        raise argparse.ArgumentTypeError("needs a path, not an empty text")
    return Path(text)


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
            allow_abbrev=False,  # Options of the script, which stand after it, would count as ambiguous ones.
        )

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message."""
        raise ConfigError(f"{message}: see {self.prog} --help")

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """Parse all arguments; ConfigError if one is unknown (the message names the nearest), missing or malformed."""
        parsed, unknown = self.parse_known_args(arguments)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            name = unknown[0].partition("=")[0]
            hint = nearest(name, options) if name.startswith("--") else ""
            see = hint if hint.startswith("did") else f"see {self.prog} --help"
            raise ConfigError(f"{self.prog} has no argument {name!r}: {see}")
        return parsed


def require_torch(subcommand: str) -> None:
    """Refuse a subcommand that needs PyTorch if it is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"evenstep {subcommand} needs PyTorch: pip install torch, or install the build for your device"
            " (https://pytorch.org)"
        )


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
