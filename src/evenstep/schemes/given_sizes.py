"""Reads the batch sizes that the user gives: by rank, or by `rank:2`, `host:node7` and `gpu:NAME`."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import ClassVar, Final, TypeAlias, cast, final

from evenstep.core.errors import ConfigError
from evenstep.core.load.base import Load, LoadPolicy
from evenstep.core.load.static import Static
from evenstep.core.nearest import nearest
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED
from evenstep.core.workers import name_workers

Sizes: TypeAlias = Sequence[int] | Mapping[str, int]

_KINDS: Final = ("rank", "host", "gpu")
"""The kinds of keys; the first that matches a worker wins."""
_BETWEEN_KEYS: Final = re.compile(r"[,/](?=[^,/=]*:)")
"""A GPU's name may contain a slash."""


def read_sizes(given: object) -> tuple[int, ...] | dict[str, int]:
    """Return the sizes in a list, a mapping or a text: by rank, or by key.

    Raises:
        ConfigError: A value is not a size, or a key does not begin with rank:, host: or gpu:.
        TypeError: The argument is something else.

    >>> read_sizes("12/9/3"), read_sizes('rank:0=12,"gpu:NVIDIA RTX 3090"=24'), read_sizes({0: 12})
    ((12, 9, 3), {'rank:0': 12, 'gpu:NVIDIA RTX 3090': 24}, {'rank:0': 12})
    """
    if isinstance(given, str):
        given = _in_text(given)
    if not isinstance(given, Mapping):
        return tuple(_size(size, f"worker {rank}") for rank, size in enumerate(cast("Iterable[object]", given)))
    sizes: dict[str, int] = {}
    for name, size in given.items():
        key = f"rank:{name}" if isinstance(name, int) else str(name).strip("\"'")
        if key.partition(":")[0] not in _KINDS:
            raise ConfigError(f"a batch size cannot be that of {shown(key)}: write rank:NUMBER, host:NAME or gpu:NAME")
        sizes[key] = _size(size, key)
    return sizes


def text_of(sizes: Sizes) -> str:
    """The text from which `read_sizes` reads these sizes."""
    return "/".join([f"{key}={size}" for key, size in sizes.items()] if isinstance(sizes, Mapping) else map(str, sizes))


@final
@dataclass(frozen=True, kw_only=True)
class ByKey(Load):
    """The user's sizes by rank, host or GPU; `Static` once the workers are known."""

    follows_speed: ClassVar[bool] = False

    sizes: tuple[tuple[str, int], ...]

    def policy(self, workers: int) -> LoadPolicy:
        """Raise ConfigError: there is no policy before the workers are known."""
        raise ConfigError(f"hosts and GPUs of the {workers} workers are not known: give sizes by rank, such as 12/9/3")

    def of(self, workers: Sequence[Mapping[str, str]]) -> Static:
        """The sizes of these workers, each described by its `rank`, `host` and `gpu`.

        Raises:
            ConfigError: A key matches no worker, or a worker matches no key.
        """
        by_key = dict(self.sizes)
        present = [f"{kind}:{worker[kind]}" for worker in workers for kind in _KINDS if worker[kind]]
        for key in by_key:
            if key not in present:
                raise ConfigError(f"there is a batch size of {key!r}, which matches no worker: {nearest(key, present)}")
        chosen = [
            next((by_key[key] for kind in _KINDS if (key := f"{kind}:{worker[kind]}") in by_key), None)
            for worker in workers
        ]
        without = [rank for rank, size in enumerate(chosen) if size is None]
        if without:
            host = workers[without[0]]["host"]
            raise ConfigError(f"there is no batch size of {name_workers(without)}: add a key such as 'host:{host}'")
        return Static(sizes=tuple(size for size in chosen if size is not None))


def _in_text(text: str) -> list[object] | dict[str, object]:
    """Sizes separated by commas or slashes; values that are not numbers stay texts."""
    if "=" not in text:
        return [_number(part) for part in re.split("[,/]", text) if text]
    pairs = [part.partition("=") for part in _BETWEEN_KEYS.split(text)]
    sizes = {key.strip(): _number(size) for key, _, size in pairs}
    if len(sizes) < len(pairs):
        raise ConfigError(f"a batch size stands twice in {shown(text)}: give it once")
    return sizes


def _number(text: str) -> object:
    text = text.strip()
    return int(text) if is_number(text) else text


def is_number(text: str) -> bool:
    """True if the text is a whole number of few digits: Python refuses to read one of thousands."""
    return text.isdecimal() and len(text) <= 15


def _size(value: object, whose: str) -> int:
    try:
        size = 0 if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        size = 0
    if not 1 <= size <= UNLIMITED:
        raise ConfigError(f"the batch size of {whose} must be a whole number from 1 to {UNLIMITED}, not {shown(value)}")
    return size
