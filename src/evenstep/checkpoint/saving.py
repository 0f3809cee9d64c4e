"""Writes a checkpoint. All workers write parts of it, and it gets its name once it is whole."""

import json
import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

import evenstep
from evenstep.checkpoint.contents import Contents, Stateful, random_state
from evenstep.checkpoint.folder import CheckpointFolder, Fingerprint, fingerprint, write_durably, written_files
from evenstep.checkpoint.together import collectives, together
from evenstep.checkpoint.tree import packed, take_apart
from evenstep.core.checkpoints import number_of
from evenstep.core.disagreement import Field, require_agreement
from evenstep.core.errors import CheckpointError, ConfigError
from evenstep.core.shown import shown
from evenstep.core.values import UNLIMITED, require_whole
from evenstep.torch.agree import device_identity
from evenstep.torch.data.batches import Batches
from evenstep.torch.engines.engine import Engine
from evenstep.torch.engines.served import ServedEngine

FORMAT: Final = 1
TENSORS: Final = "tensors"
VALUES: Final = "values.pt"
RUN: Final = "run.json"
_ORDER: Final = "give folder, model, optimizer, loader, in this order"


def save(
    folder: str | os.PathLike[str],
    model: Any,
    optimizer: Any,
    loader: Batches | tuple[Batches, ...],
    *,
    keep: int = 2,
    extras: Mapping[str, Stateful] | None = None,
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

    Returns:
        The checkpoint, a directory in `folder`. Under `evenstep profile`, which trains nothing worth keeping, nothing
        is written, and it returns `folder`.

    Raises:
        ConfigError: The scheme trains on servers, which write their own snapshots, or something cannot be saved.
        CheckpointError: It could not be written, on this worker or another. Older checkpoints are untouched.
        WorkerLostError: A worker died meanwhile.
    """
    keep = require_whole("keep", keep, 1, UNLIMITED)
    loader, *others = require_arguments(folder, model, optimizer, loader)
    engine = loader.engine
    if loader.profiled:
        return Path(folder)
    if not engine.synchronises:
        raise ConfigError(
            "a checkpoint was to be saved between two micro-batches of an iteration: save where loader.synchronises"
        )
    loader.settle()
    checkpoints = CheckpointFolder(Path(folder))
    known = loader.checkpoints.get(checkpoints.path.absolute())
    first = engine.workers.rank == 0

    def begin() -> dict[str, Any]:
        contents = Contents.of(model, optimizer, extras)
        return {
            "name": checkpoints.begin(known) if first else None,
            "extras": sorted(contents.extras),
            "device": device_identity(contents.device, engine.workers),
            "finite": contents.finite,
            "forecaster": engine.balancer.meter.state_dict(),
        }

    told = together(engine, begin)
    require_agreement(told, {"extras": Field(phrase="the extras {}", then="save the same on every worker")})
    contents = Contents.of(model, optimizer, extras)
    name: str = told[0]["name"]
    finite = all(each["finite"] for each in told)
    diverged = first and not finite and _newest_is_finite(checkpoints)
    state = _trained_on(loader)
    further = [_trained_on(each) for each in others]
    try:
        run = {
            "format": FORMAT,
            "scheme": loader.scheme,
            "loader": state,
            "others": further,
            "devices": [each["device"] for each in told],
            "forecasters": [each["forecaster"] for each in told],
        }
        files = _write(checkpoints.partial(name), contents, run, engine)
        manifest = {
            "format": FORMAT,
            "evenstep": evenstep.__version__,
            "torch": torch.__version__,
            "workers": engine.workers.count,
            "epoch": state["epoch"],
            "iteration": state["iteration"],
            "finite": finite,
            "files": files,
        }
        together(engine, lambda: str(checkpoints.finish(name, manifest, keep=keep)) if first else None)
    finally:
        checkpoints.end(name)
        # Also if an error came after it had its name: the next save must not take it for another run's.
        if os.path.exists(checkpoints.path / name):
            loader.checkpoints[checkpoints.path.absolute()] = number_of(name)
    engine.balancer.record_checkpoint(name, restored=False)
    if diverged:
        with suppress(OSError):
            warnings.warn(
                f"the weights of {name} hold a NaN or an infinity: {checkpoints.way_back()}",
                stacklevel=2,
            )
    return checkpoints.path / name


def _newest_is_finite(checkpoints: CheckpointFolder) -> bool:
    """Whether the newest checkpoint has finite weights, if there is one: else its writer has told."""
    with suppress(OSError):
        return checkpoints.newest_first()[:1] in ([], [checkpoints.last_finite()])
    return False


def require_arguments(folder: object, model: object, optimizer: object, loader: object) -> tuple[Batches, ...]:
    """Refuse arguments of `save` or `restore` that are something else, such as each other, and schemes on servers.

    Returns the loaders.
    """
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
    return loaders


def _trained_on(loader: Batches) -> dict[str, Any]:
    """The loader's state at the optimizer's last step, so that later batches are handed out again."""
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
    return {**state, "iteration": max(0, state["iteration"] - loader.unstepped)}


def _write(partial: Path, contents: Contents, run: Mapping[str, Any], engine: Engine) -> dict[str, Fingerprint]:
    """Write everything except the manifest; return the fingerprint of each file.

    In joint steps, so that no worker waits in a collective for a worker that has failed.
    """
    workers = engine.workers
    together(engine, lambda: _require_shared(partial))
    tensors: dict[str, torch.Tensor] = {}
    together(engine, lambda: tensors.update(_write_values(partial, contents, run, workers.rank)))
    together(engine, lambda: _write_tensors(partial, tensors, engine))

    def fingerprints() -> dict[str, Fingerprint]:
        mine = written_files(partial)[workers.rank :: workers.count]
        return {name: fingerprint(partial / name) for name in mine}

    return {name: found for part in together(engine, fingerprints) for name, found in part.items()}


def _write_values(partial: Path, contents: Contents, run: Mapping[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """Write everything except the tensors, and return these."""
    plain, tensors = take_apart(contents.state())
    if rank == 0:
        for name, values in plain["extras"].items():
            packed(f"the extra {name!r}", values)  # For an error that names it.
        write_durably(partial / VALUES, packed("the model or the optimizer", plain))
        write_durably(partial / RUN, json.dumps(run).encode())
    write_durably(partial / generators_of(rank), packed("the random generators", random_state(contents.device)))
    return tensors


def _write_tensors(partial: Path, tensors: dict[str, torch.Tensor], engine: Engine) -> None:
    group = engine.workers.host_group
    with collectives(engine):
        save_tensors(
            tensors,
            storage_writer=FileSystemWriter(partial / TENSORS),
            # Of what all workers have alike, worker 0's is written.
            planner=DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True),
            process_group=group,
            no_dist=group is None,
        )


def generators_of(rank: int) -> str:
    """The file of a worker's random generators."""
    return f"generators-{rank}.pt"


def _require_shared(partial: Path) -> None:
    if not partial.is_dir():
        raise CheckpointError(
            f"the folder {partial.parent} is not the one that worker 0 sees: give a folder on a file system that all"
            " hosts share"
        )
