"""Starts worker processes on this machine, as one process group, and runs a function in all of them."""

import os
import traceback
from datetime import timedelta
from multiprocessing import connection, get_context, set_start_method

import torch
import torch.distributed as dist

_LIMIT = timedelta(seconds=300)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerFailedError(RuntimeError):
    """A worker raised; the message is its traceback."""


def run_workers(count, target, argument, show=print):
    """The result of `target(rank, argument, tell)` on rank 0, run in `count` processes; `tell(text)` reaches `show`."""
    for name in _THREADS:
        os.environ.setdefault(name, "1")
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "evenstep.torch.prepare"])
    # The parent keeps the store, as torchrun's agent does; port 0 is any free one.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = {}, []
    for rank in range(count):
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(rank, count, store.port, theirs, target, argument))
        process.start()
        theirs.close()
        pipes[ours] = rank
        processes.append(process)
    try:
        result = _await(pipes, show)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        for process in processes:
            process.join()
    return result


def _await(pipes, show):
    results = {}
    open_pipes = dict(pipes)
    while open_pipes:
        for ready in connection.wait(list(open_pipes)):
            rank = open_pipes[ready]
            try:
                kind, value = ready.recv()
            except EOFError:
                del open_pipes[ready]
                if rank not in results:
                    raise WorkerFailedError(f"worker {rank} died without a word") from None
                continue
            if kind == "tell":
                show(value)
            elif kind == "error":
                raise WorkerFailedError(f"worker {rank}:\n{value}")
            else:
                results[rank] = value
    return results[0]


def _child(rank, count, port, pipe, target, argument):
    torch.set_num_threads(1)
    # As under torchrun: a DataLoader's processes would otherwise each go through a fork server of this worker's own.
    set_start_method("fork", force=True)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_LIMIT)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("benchmark", store), rank=rank, world_size=count, timeout=_LIMIT
    )

    def tell(text):
        if rank == 0:
            pipe.send(("tell", text))

    try:
        result = target(rank, argument, tell)
        dist.barrier()
        pipe.send(("result", result if rank == 0 else None))
        dist.destroy_process_group()
    except Exception:
        pipe.send(("error", traceback.format_exc()))
    pipe.close()
