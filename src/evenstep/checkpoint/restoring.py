"""Restores the newest whole checkpoint."""

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from evenstep.checkpoint.contents import Contents, Stateful, restore_random_state
from evenstep.checkpoint.folder import MANIFEST, CheckpointFolder, DamagedError, manifest_of, require_whole
from evenstep.checkpoint.saving import FORMAT, RUN, TENSORS, VALUES, generators_of, require_arguments
from evenstep.checkpoint.together import collectives, together
from evenstep.checkpoint.tree import unpacked
from evenstep.core.checkpoints import heir, number_of
from evenstep.core.errors import CheckpointError, ConfigError
from evenstep.server.shard.snapshots import patiently
from evenstep.torch.agree import device_identity
from evenstep.torch.data.batches import Batches
from evenstep.torch.engines.engine import Engine


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
    range(loader.epoch, epochs)`. The checkpoint's global batch size and seed win over those of this start, with a
    warning. Every file is compared with what was written. A damaged checkpoint is left out, and the one before it is
    used, with a warning. So does a warning say if the weights are not finite, and which checkpoint has finite ones.

    Args:
        folder: As for `save`.
        model: What `prepare` returned, or a tuple of them.
        optimizer: What `prepare` returned, or a tuple of them.
        loader: What `prepare` returned, or a tuple of the same loaders as were saved.
        extras: The same names as were saved.

    Returns:
        The checkpoint, a directory in `folder`. None if there is none yet, and under `evenstep profile`; nothing has
        changed then.

    Raises:
        ConfigError: The scheme trains on servers, or the checkpoint is of another model, optimizer or dataset.
        CheckpointError: No checkpoint is whole, or they could not be read.
        WorkerLostError: A worker died meanwhile.
    """
    loader, *others = require_arguments(folder, model, optimizer, loader)
    engine = loader.engine
    if loader.profiled:
        return None
    checkpoints = CheckpointFolder(Path(folder))
    together(engine, lambda: len(Contents.of(model, optimizer, extras).models))
    first = engine.workers.rank == 0
    names: list[str] = together(engine, lambda: checkpoints.newest_first() if first else [])[0]
    name = _newest_whole(checkpoints, names, engine)
    if name is not None:
        _read(checkpoints.path / name, Contents.of(model, optimizer, extras), loader, others)
    loader.checkpoints[checkpoints.path.absolute()] = number_of(names[0]) if names else 0
    if name is None:
        return None
    engine.balancer.record_checkpoint(name, restored=True)
    with suppress(OSError, DamagedError):
        if first and not manifest_of(checkpoints.path / name).get("finite", True):
            warnings.warn(
                f"the weights of {name} hold a NaN or an infinity: {checkpoints.way_back()}",
                stacklevel=2,
            )
    return checkpoints.path / name


def _newest_whole(checkpoints: CheckpointFolder, names: Sequence[str], engine: Engine) -> str | None:
    """The first of these checkpoints that is not damaged; None if there are none."""
    damage = ""
    for name in names:
        found = _damage(checkpoints.path / name, engine)
        if found is None:
            return name
        damage = damage or f"{name} is damaged ({found})"
        if engine.workers.rank == 0:
            warnings.warn(
                f"the checkpoint {checkpoints.path / name} is damaged ({found}) and left out: training goes on from the"
                " one before, if there is one",
                stacklevel=3,
            )
    if names:
        raise CheckpointError(
            f"no checkpoint in {checkpoints.path} is whole, and {damage}: give another folder to start over"
        )
    return None


def _damage(checkpoint: Path, engine: Engine) -> str | None:
    """What is wrong with a checkpoint, of which each worker checks a part; None if it is whole."""

    def check() -> str | None:
        try:
            files = manifest_of(checkpoint)["files"]
            mine = sorted(files)[engine.workers.rank :: engine.workers.count]
            require_whole(checkpoint, {name: files[name] for name in mine})
        except DamagedError as error:
            return str(error)
        return None

    seen = together(engine, lambda: (checkpoint / MANIFEST).exists())
    if any(seen) and not all(seen):
        raise CheckpointError(
            f"worker {seen.index(False)} does not see {checkpoint}, and worker {seen.index(True)} does: give a folder"
            " on a file system that all hosts share"
        )
    return next((found for found in together(engine, check) if found is not None), None)


def _read(checkpoint: Path, contents: Contents, loader: Batches, others: Sequence[Batches]) -> None:
    """Restore in joint steps, so that no worker waits in a collective for a worker that has failed."""
    engine, workers = loader.engine, loader.engine.workers
    reader = FileSystemReader(checkpoint / TENSORS)
    run: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    targets: dict[str, Any] = {}

    def make_room() -> None:
        run.update(json.loads(patiently((checkpoint / RUN).read_bytes)))
        plain.update(unpacked(patiently((checkpoint / VALUES).read_bytes)))
        if run["format"] != FORMAT:
            raise CheckpointError(
                f"the checkpoint {checkpoint} has format {run['format']}, not {FORMAT}: restore it with the evenstep"
                " that wrote it"
            )
        if len(run.get("others", [])) != len(others):
            raise ConfigError(
                f"the checkpoint is of {1 + len(run.get('others', []))} loaders and {1 + len(others)} are to be"
                " restored: give the same"
            )
        targets.update(contents.targets(plain, patiently(reader.read_metadata)))

    def go_on() -> None:
        contents.load(plain, targets)
        for each, state in zip((*others, loader), (*run.get("others", []), run["loader"]), strict=True):
            _continue_loader(each, state, run, device_identity(contents.device, workers))
        if len(run["devices"]) == workers.count:
            generators = unpacked(patiently((checkpoint / generators_of(workers.rank)).read_bytes))
            restore_random_state(generators, contents.device)

    def read_tensors() -> None:
        group = workers.host_group
        with collectives(engine):
            load_tensors(
                targets,
                storage_reader=reader,
                planner=DefaultLoadPlanner(flatten_state_dict=False),
                process_group=group,
                no_dist=group is None,
            )

    together(engine, make_room)
    together(engine, read_tensors)
    together(engine, go_on)


def _continue_loader(loader: Batches, state: Mapping[str, Any], run: Mapping[str, Any], device: str) -> None:
    """Restore the position in the samples and, under the same scheme, what was learned about speeds."""
    if run["scheme"] != loader.scheme:
        loader.load_state_dict({**state, "load": {**state["load"], "workers": 0}})
        return
    # Each worker has its own predictor, and continues the one that was trained on its device.
    loader.load_state_dict({**state, "load": {**state["load"], "worker": None}})
    predecessor = heir(device, run["devices"])
    if predecessor is not None:
        loader.engine.balancer.meter.load_state_dict(run["forecasters"][predecessor])
