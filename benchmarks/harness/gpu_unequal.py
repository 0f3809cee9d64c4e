"""Workers of unequal speed on one device: by shares of it, or by a program beside one of them."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, nullcontext
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import evenstep
from harness import gpu_tasks
from harness.competitors import Hog, pin
from harness.gpu_timing import wait_for

SHARES = (100, 50, 25)
"""Per cent of the device's threads that a worker's kernels may have, under CUDA's Multi-Process Service (MPS)."""
_BUSY = """
import torch
one = torch.randn(4096, 4096, device="cuda")
print(flush=True)
while True:
    one = (one @ one).tanh()
"""


@contextmanager
def shares_of_the_device():
    """An MPS of our own, which changes nothing about the device; yields whether there is one."""
    if shutil.which("nvidia-cuda-mps-control") is None:
        yield False
        return
    with tempfile.TemporaryDirectory() as folder:
        place = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in place.values():
            os.mkdir(path)
        started = subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **place}, check=False)
        if started.returncode:
            yield False
            return
        os.environ.update(place)
        try:
            yield True
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", env=os.environ, check=False)
            for name in place:
                del os.environ[name]


@contextmanager
def busy(rank, device):
    """A program that competes with worker 0: for its core on the CPU, for the device on CUDA."""
    if rank:
        yield
    elif device == "cpu":
        hog = Hog(rank)
        hog.turn(on=True)
        try:
            yield
        finally:
            hog.end()
    else:
        process = subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE)
        try:
            process.stdout.readline()
            yield
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def against_equal_sizes(rank, plan, tell):
    """Seconds an iteration under plain DDP and under lb-bsp, the sizes at its end, and how the workers were slowed."""
    device = plan["device"]
    if plan["shares"]:
        os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(SHARES[rank])
    if device == "cpu":
        pin(rank % (os.cpu_count() or 1))
    with nullcontext() if plan["shares"] else busy(rank, device):
        seconds, sizes = {}, None
        for variant in ("ddp", "lb-bsp"):
            run = _training(variant, plan)
            for _ in range(plan["settling"]):
                loader = next(run)
            wait_for(device)
            dist.barrier()
            laps = []
            for _ in range(plan["iterations"]):
                began = time.perf_counter()
                loader = next(run)
                wait_for(device)
                laps.append(time.perf_counter() - began)
            seconds[variant] = laps
            sizes = loader.batch_sizes if variant == "lb-bsp" else sizes
    return {"seconds": seconds, "sizes": sizes, "by": "shares" if plan["shares"] else "a program beside worker 0"}


def _training(variant, plan):
    device = torch.device(plan["device"])
    width, batch = plan["width"], plan["batch"]
    model = gpu_tasks.Net(width, torch.float32).to(device)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    dataset = gpu_tasks.rows(batch * dist.get_world_size() * 64, torch.float32)
    if variant == "ddp":
        sampler = DistributedSampler(dataset, dist.get_world_size(), dist.get_rank())
        loader = DataLoader(dataset, batch_size=batch, sampler=sampler)
    else:
        source = gpu_tasks.loader_of(dataset, batch)
        model, optimizer, loader = evenstep.prepare(
            model, optimizer, source, scheme=variant, process_group=dist.group.WORLD
        )
    while True:
        for inputs, targets in loader:
            loss = gpu_tasks.loss_of(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loader


def gain(found):
    """How many times the samples/s of equal sizes, on the slowest clock."""
    return median(found["seconds"]["ddp"]) / median(found["seconds"]["lb-bsp"])
