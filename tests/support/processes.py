"""Runs a function in several real worker processes that form a gloo process group."""

import gc
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from dataclasses import dataclass
from typing import Any

from support.guard import GUARD_SECONDS

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["support.forked"])


@dataclass
class Outcome:
    """What became of one worker: a `value`, or the `error` it raised (as type and text), or a signal in `exitcode`."""

    value: Any = None
    error: str | None = None
    exitcode: int | None = None


def run_workers(function, workers, *arguments, stopped=(), environment=None):
    """Every worker's outcome of `function(*arguments)`.

    Workers in `stopped` stop themselves for good (SIGSTOP): they are killed once all others have ended. With an
    `environment` they get it, and torchrun's numbers, instead of a process group.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes, ends = [], []
        for rank in range(workers):
            end, remote = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_worker,
                args=(function, rank, workers, os.path.join(folder, "store"), environment, remote, arguments),
            )
            process.start()
            remote.close()
            processes.append(process)
            ends.append(end)
        try:
            return _outcomes(processes, ends, time.monotonic() + GUARD_SECONDS, set(stopped))
        finally:
            for process, end in zip(processes, ends, strict=True):
                process.kill()
                process.join()
                end.close()


def results(outcomes):
    """The values, where every worker ended well."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"worker {rank}: {outcome.error}"
        assert outcome.exitcode in (None, 0), f"worker {rank} ended with {outcome.exitcode}"
    return [outcome.value for outcome in outcomes]


def _outcomes(processes, ends, deadline, stopped):
    outcomes = [Outcome() for _ in processes]
    waiting = dict(zip(ends, range(len(processes)), strict=True))
    while set(waiting.values()) - stopped:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"workers {sorted(waiting.values())} did not finish in time"
        for end in ready:
            rank = waiting.pop(end)
            try:
                kind, content = end.recv()
            except EOFError:
                processes[rank].join()
                outcomes[rank].exitcode = processes[rank].exitcode
                continue
            if kind == "value":
                outcomes[rank].value = content
            else:
                outcomes[rank].error = content
    for rank, process in enumerate(processes):
        if rank not in stopped:
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"worker {rank} did not end"
    return outcomes


def _worker(function, rank, workers, store, environment, end, arguments):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # What was imported for the function: frameworks collect often, and would look through it each time.
    # For the script's own DataLoader, as where nobody chose. What is inherited is the context of this process: a fork
    # server of its own, which would import torch first.
    multiprocessing.set_start_method("fork", force=True)
    grouped = workers > 1 and environment is None
    if environment is not None:
        os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(workers))
    try:
        if grouped:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)
        end.send(("value", function(*arguments)))
        if grouped:
            dist.barrier()
            dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        end.send(("error", f"{type(error).__name__}: {error}"))
    finally:
        end.close()
