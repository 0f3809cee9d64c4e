"""Restores the newest whole checkpoint."""

import io
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_from
from torch.distributed.checkpoint.stateful import Stateful

from evenstep.checkpoint.contents import Contents, restore_random_state, unpacked
from evenstep.checkpoint.folder import CheckpointFolder, DamagedError, manifest_of, require_whole
from evenstep.checkpoint.saving import FORMAT, RUN, VALUES, generators_of, require_arguments
from evenstep.checkpoint.together import together
from evenstep.checkpoint.writing import Saver
from evenstep.core.checkpoints import number_of
from evenstep.core.errors import CheckpointError, ConfigError
from evenstep.server.shard.snapshots import patiently
from evenstep.torch.agree import device_identity
from evenstep.torch.data.batches import Batches
from evenstep.torch.engines.engine import Engine
from evenstep.torch.processes.workers import Workers


def restore(
    folder: str | os.PathLike[str],
    model: Any,
    optimizer: Any,
    loader: Batches | tuple[Batches, ...],
    *,
    extras: Mapping[str, Stateful] | None = None,
) -> Path | None:
    """Continue from the newest whole checkpoint, on any number of workers. All workers must call it together.

    Call it after `prepare` and before the first loop, which then continues in mid-epoch: `for epoch in
    range(loader.epoch, epochs)`. The checkpoint's global batch size and seed override the values given now, with a
    warning. Every file is compared with what was written. A damaged checkpoint is left out, and the one before it is
    used, with a warning. A warning also says if the weights are not finite, and which checkpoint has finite ones.

    Args:
        folder: As for `save`.
        model: What `prepare` returned, or a tuple of them.
        optimizer: What `prepare` returned, or a tuple of them.
        loader: What `prepare` returned, or a tuple of the same loaders as were saved.
        extras: The same names as were saved.

    Returns:
        The checkpoint, a directory in `folder`. None if there is none yet, and under `evenstep plan`; nothing has
        changed then.

    Raises:
        ConfigError: The scheme trains on servers, or the checkpoint is of another model, optimizer or dataset.
        CheckpointError: No checkpoint is whole, or they could not be read.
        WorkerLostError: A worker died meanwhile.
    """
    loader, *others = require_arguments(folder, model, optimizer, loader)
    engine = loader.engine
    if loader.surveyed:
        return None
    saver = Saver.of(Path(folder), engine)
    checkpoints = saver.folder

    def look() -> list[str]:
        saver.wait()
        Contents.of(model, optimizer, extras)
        return checkpoints.newest_first() if engine.workers.processes.rank == 0 else []

    names: list[str] = together(engine, look)[0]
    name = _newest_whole(checkpoints, names, engine)
    if name is not None:
        _read(checkpoints.path / name, Contents.of(model, optimizer, extras), (loader, *others))
    checkpoints.known = number_of(names[0]) if names else 0
    if name is None:
        return None
    engine.tracker.record_checkpoint(name, restored=True)
    with suppress(OSError, DamagedError):
        if engine.workers.processes.rank == 0 and not manifest_of(checkpoints.path / name).get("finite", True):
            warnings.warn(checkpoints.not_finite(name), stacklevel=2)
    return Path(folder) / name


def _newest_whole(checkpoints: CheckpointFolder, names: Sequence[str], engine: Engine) -> str | None:
    """Return the first of these checkpoints that is not damaged; None if there are none."""
    damage = ""
    for name in names:
        found = together(engine, partial(_check, checkpoints.path / name, engine.workers.processes))
        seen = [each["seen"] for each in found]
        if any(seen) and not all(seen):
            raise CheckpointError(
                f"worker {seen.index(False)} does not see {checkpoints.path / name}, and worker {seen.index(True)}"
                " does: give a folder on a file system that all hosts share"
            )
        wrong = next((each["damage"] for each in found if each["damage"]), None)
        if wrong is None:
            return name
        damage = damage or f"{name} is damaged ({wrong})"
        if engine.workers.processes.rank == 0:
            warnings.warn(
                f"the checkpoint {checkpoints.path / name} is damaged ({wrong}) and left out: training goes on from the"
                " one before, if there is one",
                stacklevel=3,
            )
    if names:
        raise CheckpointError(
            f"no checkpoint in {checkpoints.path} is whole, and {damage}: give another folder to start over"
        )
    return None


def _check(checkpoint: Path, workers: Workers) -> dict[str, Any]:
    """Return whether this worker sees a checkpoint, and the damage to its part of the files; empty if there is none."""
    try:
        manifest = manifest_of(checkpoint)
        if (found := manifest.get("format")) != FORMAT:
            raise CheckpointError(
                f"{checkpoint} has format {found}, written by evenstep {manifest.get('evenstep')}, and this one reads"
                f" format {FORMAT}: go on with that one, or give another folder to start over"
            )
        mine = sorted(manifest["files"])[workers.rank :: workers.count]
        require_whole(checkpoint, {name: manifest["files"][name] for name in mine})
    except DamagedError as error:
        return {"seen": checkpoint.is_dir(), "damage": str(error)}
    return {"seen": True, "damage": ""}


def _read(checkpoint: Path, contents: Contents, loaders: Sequence[Batches]) -> None:
    """Restore from a checkpoint that is whole. Each worker reads what it needs, without waiting for others."""
    engine, workers = loaders[0].engine, loaders[0].engine.workers.processes
    found: dict[str, Any] = {}
    run: dict[str, Any] = {}
    plain: dict[str, Any] = {}

    def read() -> None:
        metadata = patiently(FileSystemReader(checkpoint).read_metadata)
        wanted = {RUN, VALUES, generators_of(workers.rank)} & metadata.state_dict_metadata.keys()
        found.update(_load(checkpoint, dict.fromkeys(wanted)))
        run.update(json.loads(found[RUN]))
        plain.update(unpacked(found[VALUES]))
        if len(run["loaders"]) != len(loaders):
            raise ConfigError(
                f"the checkpoint is of {len(run['loaders'])} loaders and {len(loaders)} are to be restored: give the"
                " same"
            )
        found.update(_load(checkpoint, contents.targets(plain, metadata)))

    def go_on() -> None:
        contents.load(plain, found)
        # Each worker has its own predictor, and continues the one that was trained on its device.
        device, devices = device_identity(contents.device, workers), run["devices"]
        forecaster = run["forecasters"][devices.index(device)] if devices.count(device) == 1 else None
        # The first loader comes last, since its sizes are used by all.
        for each, state in reversed(list(zip(loaders, run["loaders"], strict=True))):
            # Under another scheme only the position in the samples is restored, not what was learned about speeds.
            other = {"worker": None} if run["scheme"] == each.scheme else {"workers": 0}
            each.load_state_dict({**state, "load": {**state["load"], **other}})
            if forecaster is not None and run["scheme"] == each.scheme:
                each.engine.tracker.meter.load_state_dict(forecaster)
        if len(devices) == workers.count:
            restore_random_state(unpacked(found[generators_of(workers.rank)]), contents.device)

    together(engine, read)
    together(engine, go_on)


@final
class _PlainValues(DefaultLoadPlanner):
    """Reads what is not a tensor without running any code in it."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _load(checkpoint: Path, targets: dict[str, Any]) -> dict[str, Any]:
    """Read a checkpoint's tensors into the targets, and the rest in the place of theirs; return them."""

    def load() -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                load_from(
                    targets,
                    storage_reader=FileSystemReader(checkpoint),
                    planner=_PlainValues(flatten_state_dict=False, flatten_sharded_tensors=False),
                    no_dist=True,
                )
        except CheckpointException as error:
            raise OSError(error.failures[0][0]) from error

    patiently(load)
    return targets
