"""The types and ranges of `prepare`'s arguments, one row each."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from types import MappingProxyType
from typing import Any, Final, cast

import torch
from torch.optim.lr_scheduler import LRScheduler

from evenstep.cluster import Cluster
from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED
from evenstep.schemes import Scheme

LARGEST_SEED: Final = 2**63 - 1
_LONGEST_TIMEOUT: Final = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    """`read` returns the value as `prepare` uses it, or raises TypeError or ValueError; `default` then stands in.

    The text of a ConfigError, which is a ValueError, replaces the sentence made from `must_be`.
    """

    read: Callable[[Any], Any]
    must_be: str
    default: object = None


def read_arguments(given: Mapping[str, object]) -> tuple[dict[str, Any], str | None]:
    """The arguments as `prepare` uses them, and one sentence on the first that is wrong; None where none is.

    A wrong one is replaced by its default, so that this worker can join the others and tell them.
    """
    values: dict[str, Any] = {}
    mistake: str | None = None
    for name, value in given.items():
        argument = _ARGUMENTS[name]
        try:
            values[name] = argument.read(value)
        except (TypeError, ValueError, OverflowError) as error:
            values[name] = argument.default
            own = str(error) if isinstance(error, ConfigError) else None
            mistake = mistake or own or f"{name} must be {argument.must_be}, not {shown(value)}"
    return values, mistake


def whole_number(value: object, least: int, most: int) -> int:
    """The value as an integer.

    Raises:
        TypeError: It is none; a truth value is none.
        ValueError: It is out of range.
    """
    if isinstance(value, bool):
        raise TypeError("a truth value")
    number = index(value)  # type: ignore[arg-type]
    if not least <= number <= most:
        raise ValueError("out of range")
    return number


def _models(value: object) -> tuple[torch.nn.Module, ...]:
    return _all_of(torch.nn.Module, value if isinstance(value, tuple) else (value,), least=1)


def _optimizers(value: object) -> tuple[torch.optim.Optimizer, ...]:
    return _all_of(torch.optim.Optimizer, value if isinstance(value, tuple) else (value,), least=1)


def _schedulers(value: object) -> tuple[LRScheduler, ...]:
    if value is None:
        return ()
    return _all_of(LRScheduler, value if isinstance(value, Sequence) else (value,))


def _all_of(kind: type[Any], values: Sequence[object], least: int = 0) -> tuple[Any, ...]:
    if len(values) < least or not all(isinstance(value, kind) for value in values):
        raise TypeError(kind.__name__)
    return tuple(values)


def _scheme(value: object) -> Scheme | str | None:
    if not isinstance(value, Scheme | str | None):
        raise TypeError("no scheme")
    return value


def _batch_size(value: object) -> int | None:
    return None if value is None else whole_number(value, 1, UNLIMITED)


def _batch_sizes(value: object) -> list[int] | dict[Any, int] | None:
    if value is None:
        return None
    if isinstance(value, str | bytes):
        raise TypeError("a text")
    if isinstance(value, Mapping):
        return {key: _size(size, f"rank:{key}" if isinstance(key, int) else key) for key, size in value.items()}
    return [_size(size, f"worker {rank}") for rank, size in enumerate(cast("Iterable[object]", value))]


def _size(value: object, whose: str) -> int:
    try:
        return whole_number(value, 1, UNLIMITED)
    except (TypeError, ValueError):
        raise ConfigError(
            f"the batch size of {whose} must be a whole number from 1 to {UNLIMITED}, not {shown(value)}"
        ) from None


def _timeout(value: object) -> float:
    if isinstance(value, bool | str):
        raise TypeError("no number")
    seconds = float(value)  # type: ignore[arg-type]
    if not 0 < seconds <= _LONGEST_TIMEOUT:
        raise ValueError("out of range")
    return seconds


def _path(value: object) -> str | None:
    if value is None:
        return None
    text = os.fspath(value)  # type: ignore[call-overload]
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError("no path")
    return text


def _comm_hook(value: object) -> object:
    if value is None:
        return None
    if not (isinstance(value, tuple) and len(value) == 2 and callable(value[1])):
        raise TypeError("no hook")
    return value


def _emulated(value: object) -> Cluster | str | None:
    return value if isinstance(value, Cluster) else _path(value)


_ARGUMENTS: Final[Mapping[str, _Argument]] = MappingProxyType(
    {
        "model": _Argument(read=_models, must_be="a torch.nn.Module, or a tuple of them", default=()),
        "optimizer": _Argument(read=_optimizers, must_be="a torch.optim.Optimizer, or a tuple of them", default=()),
        "scheme": _Argument(
            read=_scheme, must_be="a scheme string such as 'lb-bsp', or what a recipe such as evenstep.lb_bsp() returns"
        ),
        "global_batch_size": _Argument(read=_batch_size, must_be=f"a whole number of samples from 1 to {UNLIMITED}"),
        "batch_sizes": _Argument(
            read=_batch_sizes, must_be="a list of batch sizes, one per worker, or a mapping to batch sizes"
        ),
        "seed": _Argument(
            read=partial(whole_number, least=-LARGEST_SEED - 1, most=LARGEST_SEED),
            must_be="a whole number of at most 64 bits",
            default=0,
        ),
        "timeout": _Argument(
            read=_timeout, must_be=f"a positive number of seconds, at most {_LONGEST_TIMEOUT:g}", default=300.0
        ),
        "run_dir": _Argument(read=_path, must_be="the path of a folder"),
        "comm_hook": _Argument(read=_comm_hook, must_be="a tuple of a state and a function"),
        "emulate": _Argument(read=_emulated, must_be="a Cluster, or the path of a cluster file"),
        "schedulers": _Argument(
            read=_schedulers,
            must_be="a scheduler of torch.optim.lr_scheduler, or a list of them",
            default=(),
        ),
    }
)
