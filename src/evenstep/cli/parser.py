"""argparse, with errors of one sentence instead of a page of usage."""

import argparse
from pathlib import Path
from typing import NoReturn

from evenstep.core.errors import ConfigError
from evenstep.core.nearest import nearest


def as_path(text: str) -> Path:
    """The type of an argument that is a path; an empty one would be the folder that one is in.

    Raises:
        ArgumentTypeError: It is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("needs a path, not an empty text")
    return Path(text)


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
