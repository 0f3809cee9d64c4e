"""Saves a checkpoint. All workers write parts of it, and it gets its name once it is whole."""

import json
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch.distributed.checkpoint.stateful import Stateful

import evenstep
from evenstep.checkpoint.contents import Contents, packed, random_state
from evenstep.checkpoint.together import together
from evenstep.checkpoint.writing import CheckpointWriter, Saver
from evenstep.core.disagreement import Field, require_agreement
from evenstep.core.errors import ConfigError
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED, require_whole
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.torch.agree import device_identity
from evenstep.torch.data.batches import Batches
from evenstep.torch.engines.served import ServedEngine
from evenstep.torch.model import is_sharded

FORMAT: Final = 2
VALUES: Final = "values"
RUN: Final = "run"
_ORDER: Final = "give folder, model, optimizer, loader, in this order"


def save(
    folder: str | os.PathLike[str],
    model: Any,
    optimizer: Any,
    loader: Batches | tuple[Batches, ...],
    *,
    keep: int = 2,
    extras: Mapping[str, Stateful] | None = None,
    asynchronous: bool = False,
) -> Path:
    """Write everything that the run needs to continue from here. All workers must call it together.

    A checkpoint holds the weights, the optimizer's state, the position in the samples, the sizes and speeds that
    evenstep has learned, the random generators of each worker, and the `extras`. Batches that the optimizer has not
    stepped on yet, for example in the middle of an accumulation, will be handed out again. Under `local-sgd` the models
    are averaged first, as by `loader.settle()`.

    Args:
        folder: Where this run's checkpoints are, seen by all workers. It is created if it does not exist.
        model: What `prepare` returned, or a tuple of them.
        optimizer: What `prepare` returned, or a tuple of them.
        loader: What `prepare` returned, or a tuple of a session's loaders and shares.
        keep: The number of newest checkpoints to keep. Older ones are removed once this one is whole, except the last
            whose weights are finite.
        extras: Other objects with a `state_dict`, by name: schedulers, a GradScaler, an average of the weights. Worker
            0's state is used on all workers, except for sharded tensors.
        asynchronous: Return once the state is copied into the memory of the host, so that training goes on while a
            thread writes the copy. The next `save`, `restore` or `close` waits for it, and raises its failure.

    Returns:
        The checkpoint, a directory in `folder`, which is there once it is whole. Under `evenstep plan`, which trains
        nothing worth keeping, nothing is written, and it returns `folder`.

    Raises:
        CheckpointError: It could not be written, on this worker or another, or the asynchronous one before it could
            not. Older checkpoints are untouched.
        ConfigError: The scheme trains on servers, which write their own snapshots, or something cannot be saved.
        DisagreementError: The workers have other weights, or other extras.
        WorkerLostError: A worker died meanwhile.
    """
    keep = require_whole("keep", keep, 1, UNLIMITED)
    loader, *others = require_arguments(folder, model, optimizer, loader)
    engine = loader.engine
    if loader.surveyed:
        return Path(folder)
    if not engine.synchronises:
        raise ConfigError(
            "a checkpoint was to be saved between two micro-batches of an iteration: save where loader.synchronises"
        )
    saver = Saver.of(Path(folder), engine)
    loader.settle()
    positions = [_trained_on(each) for each in (loader, *others)]
    written: dict[str, Any] = {}

    def begin() -> dict[str, Any]:
        saver.wait()
        contents = Contents.of(model, optimizer, extras)
        written.update(_own_part(contents, engine.workers.processes.rank))
        return {
            "extras": sorted(contents.extras),
            "device": device_identity(contents.device, engine.workers.processes),
            "finite": contents.finite,
            "forecaster": engine.tracker.meter.state_dict(),
            "name": saver.folder.begin() if engine.workers.processes.rank == 0 else None,
        }

    try:
        told = together(engine, begin)
        engine.compare_replicas()
        require_agreement(told, {"extras": Field(phrase="the extras {}", then="save the same on every worker")})
        name: str = told[0]["name"]
        if engine.workers.processes.rank == 0:
            devices, forecasters = ([each[key] for each in told] for key in ("device", "forecaster"))
            run = {"scheme": loader.scheme, "loaders": positions, "devices": devices, "forecasters": forecasters}
            written[RUN] = json.dumps(run)
        manifest = {
            "format": FORMAT,
            "evenstep": evenstep.__version__,
            "torch": torch.__version__,
            "workers": engine.workers.processes.count,
            "epoch": positions[0]["epoch"],
            "iteration": positions[0]["iteration"],
            "finite": all(each["finite"] for each in told),
        }
        if engine.workers.processes.rank == 0 and not manifest["finite"]:
            with suppress(OSError):
                newest = saver.folder.newest_first()[:1]
                if newest in ([], [saver.folder.last_finite()]):  # Otherwise that one is not finite either.
                    warnings.warn(saver.folder.not_finite(name), stacklevel=2)
        writer = CheckpointWriter(saver.folder, name, manifest, keep=keep)
        together(engine, partial(saver.save, written, writer, asynchronous=asynchronous))
    except BaseException:
        saver.folder.abandon()
        raise
    return Path(folder) / name


def _own_part(contents: Contents, rank: int) -> dict[str, Any]:
    """Return this worker's tensors by path, and the rest as bytes; worker 0 has what all workers share."""
    plain, tensors = contents.state()
    part = {**tensors, generators_of(rank): packed("the random generators", random_state(contents.device))}
    if rank == 0:
        for name, values in plain["extras"].items():
            packed(f"the extra {name!r}", values)  # For an error that names it.
        part[VALUES] = packed("the model or the optimizer", plain)
    return part


def generators_of(rank: int) -> str:
    """Return the name of a worker's random generators in a checkpoint."""
    return f"generators.{rank}"


def require_arguments(folder: object, model: object, optimizer: object, loader: object) -> tuple[Batches, ...]:
    """Refuse wrong arguments of `save` or `restore`, such as arguments in the wrong order, and schemes on servers.

    Returns the loaders.
    """
    if LaunchSettings.from_environment(os.environ).elastic is not None:
        raise ConfigError(
            "replicas come and go, so that none can be waited for: leave out evenstep.checkpoint, and have one replica"
            " torch.save the state_dict() of model, optimizer and loader"
        )
    if not folder or not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"folder must be the path of a folder, not {shown(folder)}: {_ORDER}")
    for name, kind, given in (
        ("model", torch.nn.Module, model),
        ("optimizer", torch.optim.Optimizer, optimizer),
        ("loader", Batches, loader),
    ):
        each = given if isinstance(given, tuple) else (given,)
        if not each or not all(isinstance(one, kind) for one in each):
            what = ", ".join(shown(one) for one in each) or "an empty tuple"
            raise ConfigError(f"{name} must be what prepare returned, or a tuple of them, not {what}: {_ORDER}")
    loaders: tuple[Batches, ...] = loader if isinstance(loader, tuple) else (cast("Batches", loader),)
    if isinstance(loaders[0].engine, ServedEngine):
        raise ConfigError(
            f"under the scheme {loaders[0].scheme!r} weights and optimizer state are on servers, which write their own"
            " snapshots: give evenstep run --run-dir, continue with --resume, and leave out evenstep.checkpoint"
        )
    models = model if isinstance(model, tuple) else (model,)
    if loaders[0].engine.workers.peers is not None and not all(map(is_sharded, models)):
        raise ConfigError(
            "a checkpoint holds tensors of one name once, and here each peer of a worker has its own: shard the model"
            " with fully_shard, or save each peer's part with torch.distributed.checkpoint"
        )
    return loaders


def _trained_on(loader: Batches) -> dict[str, Any]:
    """Return the loader's state at the optimizer's last step, so that later batches are handed out again."""
    state = loader.state_dict()
    if 1 < loader.unstepped == loader.iteration:
        warnings.warn(
            f"no step of the optimizer that prepare was given was seen in {loader.iteration} iterations, whose samples"
            " a checkpoint would hand out again: give prepare the optimizer whose step() is called",
            stacklevel=3,
        )
    elif loader.unstepped > state["iteration"]:
        warnings.warn(
            "gradients of the epoch before wait for the optimizer's step, and a checkpoint does not have them: save"
            " after optimizer.step()",
            stacklevel=3,
        )
    return loader.state_before(loader.unstepped)
