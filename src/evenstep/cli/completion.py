"""`evenstep completion`: a script for a shell, which then completes subcommands, options, schemes and files."""

import argparse
from importlib import import_module
from typing import Final

import shtab

from evenstep.cli.arguments import Parser, as_path
from evenstep.cli.main import SUBCOMMANDS
from evenstep.schemes import RECIPES

_DESCRIPTION: Final = """\
Print a script that makes a shell complete evenstep's subcommands, options, schemes and files.

Bash reads it with   eval "$(evenstep completion bash)"
zsh with             evenstep completion zsh > a folder of $fpath, as _evenstep
fish with            evenstep completion fish > ~/.config/fish/completions/evenstep.fish"""


def main(arguments: list[str]) -> int:
    """Run the subcommand."""
    print(shtab.complete(_all(), make_parser().parse(arguments).shell))
    return 0


def make_parser() -> Parser:
    """Make the parser of the options."""
    parser = Parser(prog="evenstep completion", description=_DESCRIPTION, example="evenstep completion bash")
    parser.add_argument("shell", choices=shtab.SUPPORTED_SHELLS, help="the shell that reads it")
    return parser


def _all() -> argparse.ArgumentParser:
    """Make one parser of all subcommands, which are otherwise parsed one by one."""
    parser = argparse.ArgumentParser(prog="evenstep")
    parser.add_argument("--version", action="store_true", help="print the version")
    subcommands = parser.add_subparsers()
    for name, summary in SUBCOMMANDS.items():
        own: Parser = import_module(f"evenstep.cli.{name}").make_parser()
        for action in own._actions:
            if action.type is as_path or action.dest == "script":
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.dest in ("scheme", "schemes"):
                action.choices = list(RECIPES)
        subcommands.add_parser(name, parents=[own], add_help=False, help=summary, conflict_handler="resolve")
    return parser
