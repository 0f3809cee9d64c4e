"""The limit of memory: the copies and the update that any exchange on one host needs, and nothing else.

Every worker does its own, with no server to hand over to and no lock: gradients into a buffer in shared memory, the
update of the shared weights, and their copy back. It does not keep the updates apart, so it is a limit and no exchange.
"""

import mmap
import os

import torch
import torch.distributed as dist
from harness.workers import run_workers

from contestants.case import LEARNING_RATE, Measured
from contestants.timing import timed


def measure(case):
    """All workers at once."""
    return run_workers(case.workers, _work, case, show=lambda text: None)


def _work(rank, case, tell):
    shared_gradients, shared_weights = _shared(rank, case)
    gradients, weights = torch.ones(case.elements), torch.zeros(case.elements)

    def exchange():
        shared_gradients.copy_(gradients)
        shared_weights.add_(shared_gradients, alpha=-LEARNING_RATE)
        weights.copy_(shared_weights)

    results = [None] * case.workers
    dist.all_gather_object(results, timed(case, exchange, dist.barrier))
    return Measured(workers=tuple(results))


def _shared(rank, case):
    """This worker's gradients buffer and the weights of all, in memory that worker 0 made."""
    if rank == 0:
        descriptor = os.memfd_create("evenstep-benchmark")
        os.ftruncate(descriptor, case.model_bytes * (1 + case.workers))
    place = [f"/proc/{os.getpid()}/fd/{descriptor}" if rank == 0 else None]
    dist.broadcast_object_list(place, src=0)
    if rank != 0:
        descriptor = os.open(place[0], os.O_RDWR)
    memory = mmap.mmap(descriptor, 0)
    dist.barrier()
    os.close(descriptor)
    buffers = torch.frombuffer(memory, dtype=torch.float32).view(1 + case.workers, case.elements)
    return buffers[1 + rank], buffers[0]
