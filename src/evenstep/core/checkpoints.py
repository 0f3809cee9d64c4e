"""The order of a folder's checkpoints, from their names alone."""

import re
from collections.abc import Iterable
from typing import Final

_NAME: Final = re.compile(r"checkpoint-(\d{6,})")


def checkpoints(names: Iterable[str]) -> list[str]:
    """Those of the given names that name checkpoints, oldest first.

    >>> checkpoints(["checkpoint-000010", "checkpoint-000009", "notes.txt"])
    ['checkpoint-000009', 'checkpoint-000010']
    """
    return sorted((name for name in names if _NAME.fullmatch(name)), key=number_of)


def next_checkpoint(names: Iterable[str]) -> str:
    """A name for a checkpoint that is newer than all of these.

    >>> next_checkpoint([]), next_checkpoint(["checkpoint-000009", ".partial-000012"])
    ('checkpoint-000001', 'checkpoint-000010')
    """
    newest = checkpoints(names)[-1:]
    return f"checkpoint-{1 + (number_of(newest[0]) if newest else 0):06}"


def number_of(name: str) -> int:
    """The number in a checkpoint's name; newer checkpoints have higher numbers.

    >>> number_of("checkpoint-000009")
    9
    """
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1])
