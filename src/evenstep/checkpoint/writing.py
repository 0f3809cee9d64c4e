"""Writes the files of a checkpoint through torch.distributed.checkpoint, at once or while training goes on."""

import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final, Self, final

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_at_once
from torch.futures import Future as TorchFuture

from evenstep.checkpoint.folder import CheckpointFolder, Fingerprint, fingerprint
from evenstep.checkpoint.together import explained
from evenstep.core.backends import GLOO
from evenstep.core.errors import CheckpointError
from evenstep.server.shard.snapshots import sync
from evenstep.telemetry.say import say
from evenstep.torch.engines.engine import Engine
from evenstep.torch.processes.workers import new_group

_METADATA: Final = ".metadata"


@final
class CheckpointWriter(FileSystemWriter):
    """Writes the files of one checkpoint. Once all workers have, worker 0 gives it its name.

    Args:
        folder: The folder of the checkpoint, which worker 0 has begun.
        name: Its name.
        manifest: The content of its manifest, besides the fingerprints of the files.
        keep: The number of newest checkpoints to keep.
    """

    def __init__(self, folder: CheckpointFolder, name: str, manifest: Mapping[str, Any], *, keep: int) -> None:
        super().__init__(folder.partial(name))
        self.name = name
        self._folder = folder
        self._manifest = manifest
        self._keep = keep

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse a folder that is not worker 0's."""
        if not self._folder.partial(self.name).is_dir():
            raise CheckpointError(
                f"the folder {self._folder.path} is not the one that worker 0 sees: give a folder on a file system that"
                " all hosts share"
            )
        return super().prepare_local_plan(plan)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[Any]]:
        """Write this worker's files. Their fingerprints follow the results, which worker 0 gets from all workers."""
        written = super().write_data(plan, planner).wait()
        names = sorted({each.storage_data.relative_path for each in written})
        done: TorchFuture[list[Any]] = TorchFuture()
        done.set_result([*written, {name: self._synced(name) for name in names}])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Write the last files, on worker 0."""
        super().finish(metadata, [part[:-1] for part in results])
        files = {_METADATA: self._synced(_METADATA)}
        for *_, found in results:
            files |= found
        self._folder.finish(self.name, {**self._manifest, "files": files}, keep=self._keep)

    def _synced(self, name: str) -> Fingerprint:
        path = self._folder.partial(self.name) / name
        sync(path)  # torch's own fsync comes before it flushes its buffers.
        return fingerprint(path)


@final
class Saver:
    """Saves this run's checkpoints in one folder, one after the other.

    Attributes:
        folder: The folder.
    """

    def __init__(self, path: Path, engine: Engine) -> None:
        self.folder = CheckpointFolder(path)
        self._engine = engine
        self._group: dist.ProcessGroup | None = None
        self._pending: Future[None] | None = None

    @classmethod
    def of(cls, path: Path, engine: Engine) -> Self:
        """Return the saver of a run and a folder, which is closed at the end of the run."""
        path = path.absolute()  # The script may go to another folder while a thread writes.
        saver: Self = engine.checkpoints.setdefault(path, cls(path, engine))
        return saver

    def save(self, state: dict[str, Any], writer: CheckpointWriter, *, asynchronous: bool) -> None:
        """Write tensors and bytes by name, and return once it is done, or once they are copied for a thread to write.

        All workers must call it together.

        Raises:
            OSError, RuntimeError, CheckpointException: It could not be written, on this worker or another.
        """
        group = self._engine.workers.processes.host_group
        if asynchronous and dist.is_initialized():
            if self._group is None:  # Training communicates over the others meanwhile.
                ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
                self._group = new_group([ranks], GLOO, self._engine.workers.processes.timeout_seconds)
            group = self._group
        if group is None:  # A single process needs none, but torch warns, and does so in the thread.
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
        # Worker 0 writes what all workers have alike.
        planner = DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
        if asynchronous:
            started = async_save(state, storage_writer=writer, planner=planner, process_group=group)
            assert isinstance(started, Future)
            self._pending = Future()  # A separate future, since the other one is done before it calls back.
            started.add_done_callback(partial(self._ended, writer.name, self._pending))
            return
        with self._engine.tracker.activity.waiting():
            save_at_once(state, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
        self._engine.tracker.record_checkpoint(writer.name, restored=False)

    def _ended(self, name: str, pending: Future[None], started: Future[Any]) -> None:
        """Called in the thread once it has written everything, or failed."""
        error = started.exception()
        if error is None:
            self._engine.tracker.record_checkpoint(name, restored=False)
            pending.set_result(None)
            return
        failure = explained(error, f"{name}, which was written while training went on,")
        self.folder.abandon()
        try:
            if self._engine.workers.processes.rank == 0:  # Many a script ends without closing its loader.
                say(str(failure))
        finally:
            pending.set_exception(failure)

    def wait(self) -> None:
        """Wait until nothing is being written any more.

        Raises:
            EvenstepError: A thread could not write its checkpoint.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, like `wait`, at the end of the run."""
        try:
            self.wait()
        finally:
            if self._group is not None and self._engine.workers.given_group is None:  # As in Workers.leave.
                dist.destroy_process_group(self._group)
            self._group = None
