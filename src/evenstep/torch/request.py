"""The arguments of `prepare`, each of its type, with the environment's settings beside them."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from pathlib import Path
from typing import Annotated, Any, Final, Self, final, get_type_hints

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from evenstep.cluster import Cluster
from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED
from evenstep.launch.found_batch import FoundBatch
from evenstep.launch.launch_settings import A_TIMEOUT, VARIABLES, LaunchSettings, read_timeout
from evenstep.schemes import DEFAULT, Scheme, parse_scheme, static
from evenstep.schemes.given_sizes import Sizes, read_sizes
from evenstep.torch.engines.collective import CommHook
from evenstep.torch.engines.weighting import Weights
from evenstep.torch.model import device_of

AUTO: Final = "auto"
"""The global batch size that `evenstep run --find-batch` has found."""
_DEFAULT_TIMEOUT: Final = 300.0


def whole_number(value: object, least: int, most: int) -> int:
    """The value as an integer.

    Raises:
        TypeError: It is not an integer, or is a bool.
        ValueError: It is out of range.
    """
    if isinstance(value, bool):
        raise TypeError("a truth value")
    number = index(value)  # type: ignore[arg-type]
    if not least <= number <= most:
        raise ValueError("out of range")
    return number


def _some_of(kind: type[Any], value: object, what: str = "") -> tuple[Any, ...]:
    values = value if isinstance(value, tuple) else (value,)
    if not values:
        raise ConfigError(f"no {what} was given: give yours to prepare, or to session.{what}")
    if not all(isinstance(each, kind) for each in values):
        raise TypeError(kind.__name__)
    return values


def _schedulers(value: object) -> tuple[LRScheduler, ...]:
    if value is None or (isinstance(value, Sequence) and not value):
        return ()
    return _some_of(LRScheduler, tuple(value) if isinstance(value, Sequence) else value)


_models = partial(_some_of, torch.nn.Module, what="model")
_optimizers = partial(_some_of, torch.optim.Optimizer, what="optimizer")
_seed = partial(whole_number, least=-(2**63), most=2**63 - 1)


def _scheme(value: object) -> Scheme | str | None:
    if not isinstance(value, Scheme | str | None):
        raise TypeError("no scheme")
    return value


def _batch_size(value: object) -> int | None:
    return None if value in (None, AUTO) else whole_number(value, 1, UNLIMITED)


def _batch_sizes(value: object) -> Sizes | None:
    if isinstance(value, str | bytes):
        raise TypeError("a text")
    return None if value is None else read_sizes(value)


def _timeout(value: object) -> float:
    if isinstance(value, str):
        raise TypeError("a text")
    return read_timeout(value, "timeout")


def _path(value: object) -> str | None:
    if value is None:
        return None
    text = os.fspath(value)  # type: ignore[call-overload]
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError("no path")
    return text


def _emulated(value: object) -> Cluster | str | None:
    return value if isinstance(value, Cluster) else _path(value)


def _empty(value: object) -> object:
    if value not in ("copy", "shrink"):
        raise ValueError("no such choice")
    return value


def _partition(value: object) -> object:
    if value not in (None, "common", "private"):
        raise ValueError("no such choice")
    return value


def _weights(value: object) -> object:
    if value not in ("samples", "script") and not callable(value):
        raise TypeError("no weights")
    return value


def _comm_hook(value: object) -> object:
    if value is not None and not (isinstance(value, tuple) and len(value) == 2 and callable(value[1])):
        raise TypeError("no hook")
    return value


def _process_group(value: object) -> dist.ProcessGroup | None:
    if value is not None and not isinstance(value, dist.ProcessGroup):
        raise TypeError("no group")
    return value


@dataclass(frozen=True, slots=True)
class _Argument:
    """How an argument is read: `read` returns its value, or raises TypeError, ValueError or OverflowError.

    The text of a ConfigError, which is a ValueError, replaces the sentence made from `must_be`.
    """

    must_be: str
    read: Callable[[Any], object]
    name: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a script asks for.

    `found` is what an earlier run into the same folder has found of the workers' largest batches, and if `automatic`,
    the global batch size is from there. `mistake` is a sentence about the first wrong argument, if any. Wrong arguments
    have their defaults here, so that this worker can join the others and tell them.
    """

    models: Annotated[
        tuple[torch.nn.Module, ...], _Argument("a torch.nn.Module, or a tuple of them", _models, "model")
    ] = ()
    optimizers: Annotated[
        tuple[torch.optim.Optimizer, ...],
        _Argument("a torch.optim.Optimizer, or a tuple of them", _optimizers, "optimizer"),
    ] = ()
    scheme: Annotated[
        Scheme | str | None,
        _Argument("a scheme string such as 'lb-bsp', or what a recipe such as evenstep.lb_bsp() returns", _scheme),
    ] = None
    global_batch_size: Annotated[
        int | None, _Argument(f"a whole number of samples from 1 to {UNLIMITED}", _batch_size)
    ] = None
    batch_sizes: Annotated[
        Sizes | None,
        _Argument("a list of batch sizes, one per worker, or a mapping to batch sizes", _batch_sizes),
    ] = None
    seed: Annotated[int, _Argument("a whole number of at most 64 bits", _seed)] = 0
    timeout: Annotated[float, _Argument(A_TIMEOUT, _timeout)] = _DEFAULT_TIMEOUT
    run_dir: Annotated[str | None, _Argument("the path of a folder", _path)] = None
    comm_hook: Annotated[CommHook | None, _Argument("a tuple of a state and a function", _comm_hook)] = None
    emulate: Annotated[Cluster | str | None, _Argument("a Cluster, or the path of a cluster file", _emulated)] = None
    schedulers: Annotated[
        tuple[LRScheduler, ...], _Argument("a scheduler of torch.optim.lr_scheduler, or a list of them", _schedulers)
    ] = ()
    process_group: Annotated[
        dist.ProcessGroup | None,
        _Argument("a torch.distributed.ProcessGroup that has this process as a member", _process_group),
    ] = None
    empty: Annotated[str, _Argument("'copy' or 'shrink'", _empty)] = "copy"
    partition: Annotated[str | None, _Argument("'common' or 'private'", _partition)] = None
    weights: Annotated[
        Weights, _Argument("'samples', 'script', or a function from a share to its weight", _weights)
    ] = "samples"
    loader: DataLoader[Any]
    cost: object = None
    launched: LaunchSettings
    found: FoundBatch | None = None
    automatic: bool = False
    mistake: str | None = None

    @classmethod
    def of(cls, loader: DataLoader[Any], launched: LaunchSettings, *, cost: object = None, **given: object) -> Self:
        """Read the arguments of `prepare`."""
        values: dict[str, Any] = {}
        mistake: str | None = None
        given.setdefault("weights", "samples")
        given.setdefault("partition", None)
        if given["timeout"] is None:
            given["timeout"] = _DEFAULT_TIMEOUT
            try:
                if launched.timeout is not None:
                    given["timeout"] = read_timeout(launched.timeout, VARIABLES["timeout"])
            except ConfigError as error:
                mistake = str(error)
        for field, hint in get_type_hints(cls, include_extras=True).items():
            for argument in getattr(hint, "__metadata__", ()):
                name = argument.name or field
                try:
                    values[field] = argument.read(given[name])
                except (TypeError, ValueError, OverflowError) as error:
                    own = str(error) if isinstance(error, ConfigError) else None
                    mistake = mistake or own or f"{name} must be {argument.must_be}, not {shown(given[name])}"
        request = cls(loader=loader, cost=cost, launched=launched, mistake=mistake, **values)
        return request._with_found(automatic=isinstance(given["global_batch_size"], str))

    def _with_found(self, *, automatic: bool) -> Self:
        """With what was found of the workers' largest batches; `automatic`: it also gives the global batch size."""
        folder = self.run_folder
        if self.launched.find_batch is not None or (folder is None and not automatic):
            return self
        try:
            found = None if folder is None else FoundBatch.read(folder)
        except ConfigError as error:
            return replace(self, mistake=self.mistake or str(error))
        if not automatic:
            return replace(self, found=found)
        if found is None:
            why = "no run_dir was given" if folder is None else f"{folder} holds nothing that was found"
            said = (
                f"global_batch_size='auto' is what evenstep run --find-batch --run-dir DIR has found, and {why}: run it"
                " first, with the same run directory"
            )
            return replace(self, mistake=self.mistake or said)
        return replace(self, found=found, automatic=True, global_batch_size=found.global_batch_size)

    @property
    def device(self) -> torch.device:
        """Where the first model is."""
        return device_of(self.models[0]) if self.models else torch.device("cpu")

    @property
    def events_dir(self) -> Path | None:
        """Where events go: the argument's folder, or else the environment's; None if batches are only searched for."""
        if self.launched.find_batch is not None:
            return None
        return self.run_folder

    @property
    def run_folder(self) -> Path | None:
        """The run directory."""
        given = self.run_dir if self.run_dir is not None else self.launched.run_dir
        return None if given is None else Path(given)

    def asked_scheme(self) -> Scheme:
        """The requested scheme.

        Raises:
            ConfigError: The scheme cannot be parsed, batch sizes are given too, or `process_group` and servers.
        """
        scheme = self._asked_scheme()
        if scheme.served is not None and self.process_group is not None:
            raise ConfigError(
                f"process_group does not go with {scheme.name!r}, whose workers meet at the servers: leave out one of"
                " them"
            )
        return scheme

    def _asked_scheme(self) -> Scheme:
        scheme = parse_scheme(self.scheme) if isinstance(self.scheme, str) else self.scheme
        if self.batch_sizes is None:
            return scheme or self.launched.asked_scheme() or parse_scheme(DEFAULT)
        if scheme is not None:
            raise ConfigError(
                f"batch_sizes fixes the sizes and the scheme {scheme.name!r} would set them: give one of them"
            )
        return static(self.batch_sizes)
