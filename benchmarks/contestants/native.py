"""The exchange in a few lines of C: what a native part would leave of its time, once everything else is left out.

A server process that never enters Python while it serves, and workers that call one C function for each exchange, in
memory that all share. No header, no check, no failure handled, and whoever serves decides nothing.
"""

import ctypes
import mmap
import os
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from harness.workers import run_workers

from contestants.case import LEARNING_RATE, Measured
from contestants.timing import timed

SOURCE = Path(__file__).with_name("native.c")
_WORDS = 4096
"""Bytes for the words that are waited on, before the tensors."""


def measure(case):
    """By shared memory; RuntimeError where there is no C compiler."""
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/native.so"
        command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, str(SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise RuntimeError(f"no exchange in C without a C compiler: {error}") from error
        return run_workers(case.workers + 1, _node, (case, library), show=lambda text: None)


def _node(rank, plan, tell):
    """Ranks below the number of workers are workers, the last is the server."""
    case, library = plan
    memory, start = _shared(rank, case)
    native, workers, size = ctypes.CDLL(library), case.workers, case.model_bytes
    tensors = start + _WORDS
    gradients, replies, weights = tensors, tensors + workers * size, tensors + 2 * workers * size
    result = done = None
    if rank == workers:
        pointers = [ctypes.c_void_p(each) for each in (start, start + 64, gradients, replies, weights)]
        native.serve(*pointers, workers, ctypes.c_long(case.elements), ctypes.c_float(LEARNING_RATE))
        final = torch.frombuffer(memory, dtype=torch.float32, offset=_WORDS + 2 * workers * size, count=case.elements)
        result = [float(end) / -LEARNING_RATE for end in (final.max(), final.min())]
    else:
        result, done = _work(native, case, start, start + 64 + 8 * rank, gradients + rank * size, replies + rank * size)
    results = [None] * (workers + 1)
    dist.all_gather_object(results, (result, done))
    *of_workers, (updates, _) = results
    exchanges = sum(count for _, count in of_workers)
    if updates != [exchanges, exchanges]:
        raise RuntimeError(f"{exchanges} exchanges left the weights as after {updates[0]:g} to {updates[1]:g} updates")
    return Measured(workers=tuple(one for one, _ in of_workers), details={"checked_updates": exchanges})


def _work(native, case, bell, slot, shared_gradients, shared_weights):
    gradients, weights = torch.ones(case.elements), torch.zeros(case.elements)
    places = [ctypes.c_void_p(each) for each in (bell, slot, shared_gradients, shared_weights)]
    own = [ctypes.c_void_p(each.data_ptr()) for each in (gradients, weights)]
    elements, done = ctypes.c_long(case.elements), 0
    barrier = dist.new_group(list(range(case.workers)), use_local_synchronization=True)

    def exchange():
        nonlocal done
        native.exchange(*places, *own, elements)
        done += 1

    result = timed(case, exchange, lambda: dist.barrier(barrier))
    native.exchange(*places, None, own[1], elements)
    return result, done


def _shared(rank, case):
    """Memory that rank 0 made, and its address."""
    size = _WORDS + case.model_bytes * (2 * case.workers + 1)
    if rank == 0:
        descriptor = os.memfd_create("evenstep-benchmark")
        os.ftruncate(descriptor, size)
    place = [f"/proc/{os.getpid()}/fd/{descriptor}" if rank == 0 else None]
    dist.broadcast_object_list(place, src=0)
    if rank != 0:
        descriptor = os.open(place[0], os.O_RDWR)
    memory = mmap.mmap(descriptor, size)
    dist.barrier()
    os.close(descriptor)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))
