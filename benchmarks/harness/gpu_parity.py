"""Weights on a device against one process that trains on the union of the workers' batches."""

import tempfile
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist

import evenstep
from evenstep.schemes import Scheme, parse_scheme
from evenstep.testing.scripted import Scripted
from evenstep.torch.engines.steps import leave_alone
from harness import gpu_tasks, serving

BATCH, EPOCHS = 5, 3
PRECISIONS = {"amp": torch.bfloat16, "scaler": torch.float16}
CHANGING = Scheme(name="scripted", load=Scripted(seed=11))
"""Sizes that differ between workers and change at every iteration."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One way to train.

    Attributes:
        workers: How many ranks share the device.
        samples: Of the dataset. With 77, each epoch ends with a slice that leaves a worker with nothing.
        habit: What the script does besides: `amp`, `scaler`, `compile`, `graphs`, `fsdp` or nothing.
        tolerance: How far a weight may be from one process's.
    """

    name: str
    scheme: object
    momentum: float = 0.9
    workers: int = 3
    samples: int = 77
    habit: str = ""
    tolerance: float = 1e-10


CHECKS = (
    Check(name="lb-bsp", scheme="lb-bsp"),
    Check(name="sizes that always change", scheme=CHANGING),
    Check(name="dbs", scheme="dbs"),
    Check(name="local-sgd", scheme="local-sgd:period=1"),
    Check(name="one rank on its own backend", scheme="lb-bsp", workers=1),
    Check(name="ssp with one worker", scheme="ssp:bound=1", momentum=0.0, workers=1, samples=75),
    Check(name="bsp on a server", scheme="bsp:engine=server", samples=75),
    Check(name="bfloat16 autocast", scheme=CHANGING, habit="amp", tolerance=0.02),
    Check(name="float16 autocast with a GradScaler", scheme=CHANGING, habit="scaler", tolerance=0.02),
    Check(name="torch.compile", scheme=CHANGING, habit="compile"),
    Check(name="CUDA graphs with micro-batches", scheme="lb-bsp:micro_batch=5", samples=75, habit="graphs"),
    Check(name="FSDP2", scheme="lb-bsp", habit="fsdp"),
)


def difference(rank, plan, tell):
    """The largest difference of a weight from one process's after all epochs, and the sizes of worker 0."""
    check, device = plan
    device = torch.device(device)
    with ExitStack() as stack:
        if isinstance(check.scheme, str):
            stack.enter_context(serving.served(check.scheme, stack.enter_context(tempfile.TemporaryDirectory())))
        return _train(check, device)


def _train(check, device):
    dtype = torch.float32 if check.habit in PRECISIONS else torch.float64
    model, alone = (gpu_tasks.Net(dtype=dtype).to(device) for _ in range(2))
    model = _changed(check.habit, model, device)
    optimizer, plain = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=check.momentum) for each in (model, alone))
    leave_alone(plain)
    scaler = torch.amp.GradScaler(device.type, enabled=check.habit == "scaler")
    model, optimizer, loader = evenstep.prepare(
        model,
        optimizer,
        gpu_tasks.loader_of(gpu_tasks.rows(check.samples, dtype), BATCH),
        scheme=check.scheme,
        process_group=_group_of(check),
    )
    sizes, window = [], []
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            with _precision(check.habit, device):
                loss = gpu_tasks.loss_of(model(inputs.to(device)), targets.to(device))
            sizes.append(loader.current.samples)
            if sizes[-1]:
                window.append((inputs, targets))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if loader.synchronises:
                _step_alone(alone, plain, window, device, check)
                window = []
    weights = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    weights = [each.detach() for each in weights]
    pairs = zip(weights, map(torch.Tensor.detach, alone.parameters()), strict=True)
    largest = max(float((one - other).abs().max()) for one, other in pairs)
    return {"difference": largest, "sizes of worker 0": sizes}


def _group_of(check):
    """Gloo's where ranks share a device, which NCCL refuses; evenstep's own choice for one, and on servers."""
    served = isinstance(check.scheme, str) and parse_scheme(check.scheme).served is not None
    return None if served or check.workers == 1 else dist.group.WORLD


def _changed(habit, model, device):
    if habit == "compile":
        return torch.compile(model, backend="inductor" if device.type == "cuda" else "aot_eager", dynamic=True)
    if habit == "graphs":
        return torch.compile(model, mode="reduce-overhead") if device.type == "cuda" else model
    if habit == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        return fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    return model


def _precision(habit, device):
    return torch.autocast(device.type, PRECISIONS[habit]) if habit in PRECISIONS else nullcontext()


def _step_alone(model, optimizer, window, device, check):
    """The same step in one process: the mean over what all workers computed on."""
    windows = [None] * dist.get_world_size()
    dist.all_gather_object(windows, window)
    inputs, targets = (torch.cat(each).to(device) for each in zip(*chain.from_iterable(windows), strict=True))
    optimizer.zero_grad()
    with _precision(check.habit, device):
        loss = gpu_tasks.loss_of(model(inputs), targets)
    loss.backward()
    optimizer.step()
