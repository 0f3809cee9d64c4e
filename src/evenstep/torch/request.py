"""The arguments of `prepare`, checked and typed, together with the settings from the environment."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Self, TypedDict, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, IterableDataset

from evenstep.cluster import Cluster
from evenstep.core.errors import ConfigError
from evenstep.core.values import UNLIMITED
from evenstep.launch.launch_settings import A_TIMEOUT, LaunchSettings, read_timeout
from evenstep.launch.survey import Survey
from evenstep.schemes import Scheme, in_batches, parse_scheme, static
from evenstep.schemes.given_sizes import Sizes, read_sizes
from evenstep.torch.data.sampling import Sampling
from evenstep.torch.engines.collective import CommHook
from evenstep.torch.engines.weighting import Weights
from evenstep.torch.model import device_of
from evenstep.worker.arguments import (
    RUN_DIR,
    SCHEME,
    SEED,
    Argument,
    read_arguments,
    read_kind,
    read_path,
    read_whole,
    whole,
)
from evenstep.worker.peers import Peers


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


def _batch_size(value: object) -> int | None:
    return None if value in (None, "auto") else read_whole(value, 1, UNLIMITED)


def _no_text(value: object, read: Callable[[Any], object]) -> object:
    if isinstance(value, str | bytes):
        raise TypeError("a text")
    return None if value is None else read(value)


_batch_sizes = partial(_no_text, read=read_sizes)
_timeout = partial(_no_text, read=partial(read_timeout, name="timeout"))


def _emulated(value: object) -> Cluster | str | None:
    return value if isinstance(value, Cluster) else read_path(value)


def _choice(*known: str | None) -> Argument:
    def read(value: object) -> object:
        if value not in known:
            raise ValueError("no such choice")
        return value

    return Argument(" or ".join(repr(each) for each in known if each is not None), read)


def _comm_hook(value: object) -> object:
    if value is not None and not (isinstance(value, tuple) and len(value) == 2 and callable(value[1])):
        raise TypeError("no hook")
    return value


def _names(value: object) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]
    if not all(isinstance(name, str) for name in names):
        raise TypeError("no names")
    return names


class SessionOptions(TypedDict, total=False):
    """The options of `evenstep.prepare` and `evenstep.Session`, besides `scheme`; `prepare` explains them."""

    global_batch_size: int | Literal["auto"] | None
    batch_sizes: Sequence[int] | Mapping[Any, int] | None
    seed: int
    timeout: float | None
    run_dir: str | os.PathLike[str] | None
    emulate: Cluster | str | os.PathLike[str] | None
    process_group: dist.ProcessGroup | None
    mesh: DeviceMesh | None
    data_dims: Sequence[str]
    empty: Literal["copy", "shrink"] | None
    partition: Literal["common", "private"] | None
    uneven: Literal["continue", "stop"]
    weights: Weights
    accumulation: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The arguments of a script.

    `found` holds the workers' largest batches as found by an earlier run with the same folder; if `automatic`, the
    global batch size comes from there. `checksum` is that of the loader's samples, if it is known. `mistake` describes
    the first wrong argument, if any. Wrong arguments are replaced by their defaults, so that this worker can join the
    others and tell them.
    """

    models: Annotated[
        tuple[torch.nn.Module, ...], Argument("a torch.nn.Module, or a tuple of them", _models, "model")
    ] = ()
    optimizers: Annotated[
        tuple[torch.optim.Optimizer, ...],
        Argument("a torch.optim.Optimizer, or a tuple of them", _optimizers, "optimizer"),
    ] = ()
    scheme: Annotated[Scheme | str | None, SCHEME] = None
    global_batch_size: Annotated[
        int | None, Argument(f"a whole number of samples from 1 to {UNLIMITED}", _batch_size)
    ] = None
    batch_sizes: Annotated[
        Sizes | None,
        Argument("a list of batch sizes, one per worker, or a mapping to batch sizes", _batch_sizes),
    ] = None
    seed: Annotated[int, SEED] = 0
    timeout: Annotated[float, Argument(A_TIMEOUT, _timeout)] = 300.0
    run_dir: Annotated[str | None, RUN_DIR] = None
    comm_hook: Annotated[CommHook | None, Argument("a tuple of a state and a function", _comm_hook)] = None
    emulate: Annotated[Cluster | str | None, Argument("a Cluster, or the path of a cluster file", _emulated)] = None
    schedulers: Annotated[
        tuple[LRScheduler, ...], Argument("a scheduler of torch.optim.lr_scheduler, or a list of them", _schedulers)
    ] = ()
    process_group: Annotated[
        dist.ProcessGroup | None,
        Argument(
            "a torch.distributed.ProcessGroup that has this process as a member",
            partial(read_kind, kinds=(dist.ProcessGroup, NoneType)),
        ),
    ] = None
    mesh: Annotated[
        DeviceMesh | None,
        Argument("a torch.distributed.device_mesh.DeviceMesh", partial(read_kind, kinds=(DeviceMesh, NoneType))),
    ] = None
    data_dims: Annotated[tuple[str, ...], Argument("a list of names of dimensions of the mesh", _names)] = ()
    empty: Annotated[str | None, _choice("copy", "shrink", None)] = "copy"
    partition: Annotated[str | None, _choice("common", "private", None)] = None
    uneven: Annotated[str, _choice("continue", "stop")] = "continue"
    weights: Annotated[Weights, _choice("samples", "script")] = "samples"
    accumulation: Annotated[int, whole(1, UNLIMITED)] = 1
    loader: DataLoader[Any] = None  # type: ignore[assignment]  # Before the session starts.
    cost: object = None
    checksum: int | None = None
    launched: LaunchSettings
    found: Survey | None = None
    automatic: bool = False
    mistake: str | None = None

    @classmethod
    def of(cls, launched: LaunchSettings, **options: object) -> Self:
        """Read the scheme and the options of a session."""
        values, mistake = read_arguments(RunRequest, options)
        try:
            values["timeout"] = launched.timeout_seconds(values.get("timeout"))
        except ConfigError as error:
            mistake = mistake or str(error)
        request = cls(launched=launched, mistake=mistake, **values)
        return request._with_found(automatic=isinstance(options.get("global_batch_size"), str))

    def of_parts(self, loader: DataLoader[Any], cost: object, **parts: object) -> Self:
        """The request with the script's loader, models, optimizers, schedulers and hook."""
        values, mistake = read_arguments(RunRequest, parts)
        return replace(self, loader=loader, cost=cost, mistake=self.mistake or mistake, **values)

    @property
    def streams(self) -> bool:
        """True if the loader is over an IterableDataset."""
        return isinstance(getattr(self.loader, "dataset", None), IterableDataset)

    @property
    def private(self) -> bool:
        """True if each worker has samples of its own; an IterableDataset is read by each worker by itself."""
        return self.partition == "private" or self.streams

    def draws_own(self, scheme: Scheme) -> bool:
        """True if each worker draws from data of its own, as many samples as its size says."""
        return self.private and scheme.served is None and scheme.period is None

    def _with_found(self, *, automatic: bool) -> Self:
        """Add the workers' largest batches as found; `automatic`: also take the global batch size from there."""
        folder = self.run_folder
        if self.launched.survey_up_to is not None or (folder is None and not automatic):
            return self
        try:
            found = None if folder is None else Survey.read(folder)
        except ConfigError as error:
            return replace(self, mistake=self.mistake or str(error))
        if not automatic:
            return replace(self, found=found)
        if found is None:
            why = "no run_dir was given" if folder is None else f"{folder} holds nothing that was measured"
            said = (
                f"global_batch_size='auto' is what evenstep plan --run-dir DIR -- SCRIPT has measured, and {why}: run"
                " it first, with the same run directory"
            )
            return replace(self, mistake=self.mistake or said)
        return replace(self, found=found, automatic=True, global_batch_size=found.largest_global_batch)

    @property
    def device(self) -> torch.device:
        """The device of the first model."""
        return device_of(self.models[0]) if self.models else torch.device("cpu")

    @property
    def events_dir(self) -> Path | None:
        """The folder for events, from the argument or else the environment; None if the run is a survey."""
        if self.launched.survey_up_to is not None:
            return None
        return self.run_folder

    @property
    def run_folder(self) -> Path | None:
        """The run directory."""
        given = self.run_dir or self.launched.run_dir
        return None if given is None else Path(given)

    @property
    def peers(self) -> Peers | None:
        """The processes of each worker, if a mesh says that these are several.

        Raises:
            ConfigError: The mesh has no workers along `data_dims`.
        """
        if self.mesh is None:
            return None
        from evenstep.torch.processes.meshes import peers_of

        return peers_of(self.mesh, self.data_dims)

    @property
    def expected_workers(self) -> int:
        """The number of workers, as expected before they have met."""
        with suppress(ConfigError):  # `start` tells all workers.
            if (peers := self.peers) is not None:
                return peers.count
        if dist.is_initialized():
            return dist.get_world_size(self.process_group)
        return int(os.environ.get("WORLD_SIZE", "1"))

    def asked_scheme(self) -> Scheme:
        """The requested scheme; if batches accumulate and the loader is known, with its batches as micro-batches.

        Raises:
            ConfigError: It cannot be parsed, or comes with batch sizes, or a `process_group` with servers, or batches
                cannot accumulate in it.
        """
        scheme = self._plain_scheme()
        if self.accumulation == 1 and (scheme.micro_batch is not None or not scheme.counts_periods):
            return scheme
        if self.accumulation > 1 and not scheme.sums_every_gradient:
            raise ConfigError(
                f"accumulation needs a scheme that sums gradients once a step, and {scheme.name!r} does not, or has a"
                " micro_batch of its own: use lb-bsp, dbs, bsp or batch_sizes, or leave out accumulation"
            )
        loader: object = self.loader
        if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
            return scheme  # Not given yet, or refused later.
        sampling = Sampling.of(loader)
        if sampling.whole or sampling.batch_size is None:
            raise ConfigError(
                f"{'the period' if self.accumulation == 1 else 'accumulation'} counts batches of one worker, and this"
                " loader's are for all of them: give it a batch_size and a sampler instead of a batch_sampler, or leave"
                " that out"
            )
        if self.accumulation == 1 and self.global_batch_size is not None:
            raise ConfigError(
                f"the steps of a period of {scheme.name!r} are on the loader's own batches: leave out"
                " global_batch_size, and set the loader's batch_size"
            )
        return in_batches(scheme, sampling.batch_size)

    def _plain_scheme(self) -> Scheme:
        if self.batch_sizes is not None:
            if self.scheme is not None:
                name = parse_scheme(self.scheme).name
                raise ConfigError(
                    f"batch_sizes fixes the sizes and the scheme {name!r} would set them: give one of them"
                )
            return static(self.batch_sizes)
        scheme = self.launched.scheme_of(self.scheme)
        if scheme.served is not None and self.process_group is not None:
            raise ConfigError(
                f"process_group does not go with {scheme.name!r}, whose workers meet at the servers: leave out one of"
                " them"
            )
        if self.mesh is not None or self.data_dims:
            self._require_mesh(scheme)
        return scheme

    def _require_mesh(self, scheme: Scheme) -> None:
        """Check that the mesh has workers, and refuse what goes with workers of one process each alone."""
        if self.mesh is None:
            raise ConfigError("data_dims names dimensions of a mesh, and there is none: give mesh, too")
        _ = self.peers  # An error, if there are none.
        alone = {
            f"the scheme {scheme.name!r}": not scheme.sums_every_gradient,
            "process_group": self.process_group is not None,
            "accumulation": self.accumulation > 1 or scheme.micro_batch is not None,
            "data of the workers' own": self.private,
            "evenstep plan": self.launched.survey_up_to is not None,
        }
        for what, given in alone.items():
            if given:
                raise ConfigError(
                    f"{what} goes with workers of one process each, and mesh makes workers of several: leave it out, or"
                    " use lb-bsp, dbs, bsp or batch_sizes, with a dataset that all have"
                )

    def whole_batch_size(self, scheme: Scheme, sampling: Sampling, workers: int) -> int:
        """The global batch size of a loader that samples in this way.

        Raises:
            ConfigError: It is not known, or two are given.
        """
        given, size = scheme.load.given_sizes, sampling.global_batch_size(workers)
        size = size and size * self.accumulation * scheme.batches_in_iteration
        of_shares = size if sampling.whole and not sampling.lists else None
        if self.global_batch_size is not None:
            if of_shares not in (None, self.global_batch_size):
                raise ConfigError(
                    f"shares was asked for a global batch size of {size}, and the session for"
                    f" {self.global_batch_size}: leave out that of the session"
                )
            return self.global_batch_size
        if given is not None and of_shares is None:
            return sum(given)
        if size is None and sampling.sampler is None:
            raise ConfigError(
                "the loader makes no batches itself (batch_size=None), so that the global batch is not known: give"
                " prepare a global_batch_size"
            )
        if size is None:
            raise ConfigError(
                f"the loader's batch sampler {type(sampling.sampler).__name__} does not say how long its lists are,"
                " which are the global batches: give prepare the length of the longest as global_batch_size, or the"
                " sampler a batch_size"
            )
        return size
