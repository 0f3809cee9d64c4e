"""Which checkpoint of a folder comes next, which are too old, and whose predictor goes on with whose.

Decides from names alone; it knows neither files nor what is in a checkpoint.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Final

_NAME: Final = re.compile(r"checkpoint-(\d{6,})")


def checkpoints(names: Iterable[str]) -> list[str]:
    """The names that are names of checkpoints, oldest first.

    >>> checkpoints(["checkpoint-000010", "checkpoint-000009", "notes.txt"])
    ['checkpoint-000009', 'checkpoint-000010']
    """
    return sorted((name for name in names if _NAME.fullmatch(name)), key=number_of)


def next_checkpoint(names: Iterable[str]) -> str:
    """The name of a checkpoint that is newer than all of these.

    >>> next_checkpoint([]), next_checkpoint(["checkpoint-000009", ".partial-000012"])
    ('checkpoint-000001', 'checkpoint-000010')
    """
    newest = checkpoints(names)[-1:]
    return f"checkpoint-{1 + (number_of(newest[0]) if newest else 0):06}"


def newer(names: Iterable[str], known: int) -> str | None:
    """The newest checkpoint if its number is above `known`, else None.

    >>> newer(["checkpoint-000009"], 8), newer(["checkpoint-000009"], 9), newer([], 0)
    ('checkpoint-000009', None, None)
    """
    newest = checkpoints(names)[-1:]
    return newest[0] if newest and number_of(newest[0]) > known else None


def superseded(names: Iterable[str], keep: int) -> list[str]:
    """The checkpoints beyond the newest `keep` (1 or more).

    >>> superseded(["checkpoint-000007", "checkpoint-000009", "checkpoint-000008"], keep=2)
    ['checkpoint-000007']
    """
    return checkpoints(names)[:-keep]


def heir(device: str, devices: Sequence[str]) -> int | None:
    """The index in a checkpoint's devices of the one whose predictor a worker on this device continues.

    None if the device is new, or is not the only one of its name.

    >>> heir("GPU-7", ["GPU-3", "GPU-7"]), heir("GPU-9", ["GPU-3", "GPU-7"]), heir("GPU-3", ["GPU-3", "GPU-3"])
    (1, None, None)
    """
    return devices.index(device) if devices.count(device) == 1 else None


def number_of(name: str) -> int:
    """The number in a checkpoint's name; newer checkpoints have higher numbers.

    >>> number_of("checkpoint-000009")
    9
    """
    match = _NAME.fullmatch(name)
    assert match is not None
    return int(match[1])
