"""Runs cells in which the storage fails, and looks what came of them."""

import errno
import os
import secrets
import shutil
import sys
import time
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist
from support import training
from support.processes import run_workers
from support.served import environment, forked, serve_on, server_events
from support.training import Run

import evenstep
from evenstep.checkpoint.writing import Saver
from faults.storage_cells import CUT, FLIPPED, FULL, READ_ONLY, RESTORING, SAVING, SAVING_ASIDE

RUNS = {
    "checkpoint": Run(scheme="lb-bsp", samples=48, batch_size=4, epochs=2),
    "snapshot": Run(scheme="bsp:engine=server,servers=2", samples=48, batch_size=4, epochs=4),
}
SECOND = 1.0
NUMBERS = {FULL: errno.ENOSPC, READ_ONLY: errno.EROFS}


class Disk:
    """Has the fault of a cell befall this process's operations on files while it `fails`, once it is due."""

    def __init__(self, cell, folder, worker):
        self._place, self._fault, self._folder = cell.place, cell.fault, str(folder)
        self._left = cell.place.number
        self._began = None
        self._busy = False
        self.fails = False
        if cell.place.worker in (None, worker):
            sys.addaudithook(self._hear)

    def _hear(self, event, arguments):
        if (
            not self.fails
            or self._busy
            or event not in ("open", "os.mkdir", "os.rename", "os.listdir", "os.remove", "os.rmdir")
        ):
            return
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        writes = event != "open" or bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        kind = event if event != "open" else "write" if writes else "read"
        self._busy = True
        try:
            self._meet(kind, path, writes)
        finally:
            self._busy = False

    def _meet(self, kind, path, writes):
        if self._began is None:
            # Of a file in a folder that is being removed, only the name is told.
            if kind != self._place.event or not path.endswith(self._place.path):
                return
            if self._left:
                self._left -= 1
                return
            self._began = time.monotonic()
            Path(self._folder, "fired").touch()
            if self._fault in (CUT, FLIPPED):
                damage(Path(path), self._place.damaged, self._fault)
            elif self._fault == FULL and kind == "write":
                Path(path).unlink(missing_ok=True)
                os.symlink("/dev/full", path)
                return
            elif self._fault == FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        lasts = self._fault == READ_ONLY and writes and kind != "os.listdir"
        passes = self._fault not in (FULL, READ_ONLY, CUT, FLIPPED) and time.monotonic() < self._began + SECOND
        if (lasts or passes) and (kind in ("os.remove", "os.rmdir") or path.startswith(self._folder)):
            number = NUMBERS.get(self._fault, errno.EACCES)
            raise OSError(number, os.strerror(number), path)


def damage(folder, end, fault):
    (path,) = (each for each in folder.rglob("*") if each.as_posix().endswith(end))
    content = bytearray(path.read_bytes())
    if fault == CUT:
        del content[-1]
    else:
        content[len(content) // 2] ^= 1
    path.write_bytes(content)


def check_cell(cell, folder):
    """What is wrong with what came of a cell, as sentences."""
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "notes.txt").write_text("mine")
    run = RUNS[cell.what]
    workers = 2 if cell.what == "checkpoint" else 1
    weights = training.train_alone(run, workers * run.batch_size)
    wrong = (_check_checkpoint if cell.what == "checkpoint" else _check_snapshot)(cell, folder, weights)
    if not (folder / "fired").exists():
        wrong.append("the fault did not take place")
    if (folder / "checkpoints" / "notes.txt").read_text() != "mine":
        wrong.append("a file of the user's is not as it was")
    return wrong


# Checkpoints.


def _check_checkpoint(cell, folder, weights):
    first = run_workers(save_thrice, 2, cell, folder)
    wrong = [f"worker {n}: {each.error or each.exitcode}" for n, each in enumerate(first) if each.value is None]
    if wrong:
        return wrong
    said = [each.value["said"] for each in first]
    if cell.doing != RESTORING and cell.outcome == "refused":
        wrong += [f"no sentence: {each}" for each in said if not _is_a_sentence(each)]
    else:
        wrong += [f"refused: {each}" for each in said if each]
    wrong += _differing(first, weights)
    second = run_workers(go_on, 2, cell, folder, cell.doing == RESTORING)
    if cell.doing == RESTORING and cell.outcome == "refused":
        wrong += [f"no sentence: {each.error}" for each in second if not _is_a_sentence(each.error)]
        second = run_workers(go_on, 2, cell, folder, False)
    wrong += [f"restoring, {each.error or each.exitcode}" for each in second if each.value is None]
    if wrong:
        return wrong
    name = {True: "checkpoint-000002", False: "checkpoint-000001"}[cell.newest]
    wrong += [f"{each.value['name']} was restored" for each in second if each.value["name"] != name]
    return wrong + _differing(second, weights)


def _is_a_sentence(error):
    return error is not None and "CheckpointError: " in error and "\n" not in error


def _differing(outcomes, weights):
    return (
        []
        if all(np.allclose(each.value["weights"], weights, rtol=0, atol=1e-9) for each in outcomes)
        else ["wrong weights"]
    )


def save_thrice(cell, folder):
    """The second time the storage fails; what it was like then is kept as `then`."""
    run = RUNS["checkpoint"]
    model, optimizer, loader = training.prepared(run)
    disk, said = Disk(cell, folder, dist.get_rank()), None
    for epoch in range(run.epochs):
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
            if (epoch, loader.iteration) not in ((0, 2), (0, 4), (1, 2)):
                continue
            disk.fails = (epoch, loader.iteration) == (0, 4) and cell.doing != RESTORING
            aside = disk.fails and cell.doing == SAVING_ASIDE
            keep = 1 if cell.moment == "the rotation" else 2
            try:
                evenstep.checkpoint.save(
                    folder / "checkpoints", model, optimizer, loader, keep=keep, asynchronous=aside
                )
                Saver.of(folder / "checkpoints", loader.engine).wait()
            except evenstep.CheckpointError as error:
                said = f"CheckpointError: {error}"
            if loader.iteration == 4:
                disk.fails = False
                if dist.get_rank() == 0:
                    shutil.copytree(folder / "checkpoints", folder / "then" / "checkpoints", symlinks=True)
    return {"said": said, "weights": training.weights(model)}


def go_on(cell, folder, fails):
    """From what there was right after the second save, to the end."""
    run = RUNS["checkpoint"]
    model, optimizer, loader = training.prepared(run)
    disk = Disk(cell, folder, dist.get_rank())
    disk.fails = fails
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* is damaged .*")
        restored = evenstep.checkpoint.restore(folder / "then" / "checkpoints", model, optimizer, loader)
    disk.fails = False
    for _ in range(loader.epoch, run.epochs):
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
    evenstep.checkpoint.save(folder / "then" / "checkpoints", model, optimizer, loader)
    return {"name": restored and restored.name, "weights": training.weights(model)}


# Snapshots of servers.


def _check_snapshot(cell, folder, weights):
    first = _serve(cell, folder, 3, fails=cell.doing == SAVING, resume=False)
    wrong = [] if first.value is not None else [f"the worker: {first.error or first.exitcode}"]
    told = [
        *server_events(folder, "snapshot_failed"),
        *(folder / "server-1.jsonl").read_text().split("snapshot_failed")[1:],
    ]
    if cell.doing == SAVING and bool(told) != (cell.outcome == "refused"):
        wrong.append(f"of snapshots was told: {told}")
    second = _serve(cell, folder, 4, fails=cell.doing == RESTORING, resume=True)
    if second.value is None:
        return [*wrong, f"the worker: {second.error or second.exitcode}"]
    versions = {True: (36,), False: (24,), None: (24, 36)}[cell.newest]
    restored = [event.version for event in server_events(folder, "restored")]
    if len(restored) != 1 or restored[0] not in versions:
        wrong.append(f"the versions {restored} were restored")
    return wrong + ([] if np.allclose(second.value, weights, rtol=0, atol=1e-9) else ["wrong weights"])


def _serve(cell, folder, epochs, *, fails, resume):
    """The worker's outcome of a run on two servers, of which one has the storage of the cell."""
    common = {"snapshots": str(folder / "snapshots"), "count": 2, "workers": 1, "resume": resume}
    secret, serve = secrets.token_hex(32), partial(serve_badly, cell, folder, fails)
    with ExitStack() as stack:
        second = stack.enter_context(forked({**common, "index": 1}, secret, serve))
        first = stack.enter_context(forked({**common, "index": 0, "shards": [second]}, secret, serve))
        told = environment([first, second], secret, folder)
        return run_workers(train_on_servers, 1, epochs, environment=told)[0]


def serve_badly(cell, folder, fails, settings, *arguments):
    """A server of which the storage fails."""
    Disk(cell, folder, settings["index"]).fails = fails
    serve_on(settings, *arguments)


def train_on_servers(epochs):
    model, optimizer, loader = training.prepared(RUNS["snapshot"])
    with loader:
        for _ in range(loader.epoch, epochs):
            for inputs, targets in loader:
                training.step(model, optimizer, inputs, targets)
        return training.weights(model)
