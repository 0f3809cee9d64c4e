"""What the host and the device do in an iteration: the stopwatch against a trace, waits of the host, overhead."""

import json
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, DistributedSampler

import evenstep
from evenstep.telemetry.events import IterationDone
from evenstep.telemetry.reading import read_events
from harness import gpu_tasks

WARMUP, TRACED = 10, 12
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cudaMalloc")
"""Calls of the driver in which the host stands still. `cudaMemcpyAsync` is none of them."""


def resnet(quick):
    """A net, a dataset and the batch size of a worker; tiny ones for a quick run."""
    if quick:
        return gpu_tasks.resnet((1, 1, 1, 1), 16), gpu_tasks.images(32, 32), 2
    return gpu_tasks.resnet(), gpu_tasks.images(1024, 224), 64


def gpt(quick):
    if quick:
        net = gpu_tasks.GPT(tokens=500, length=16, width=48, layers=2, heads=2)
        return net, gpu_tasks.texts(32, 16, 500), 2
    return gpu_tasks.GPT(), gpu_tasks.texts(256, 256, 20_000), 16


NETS = {"ResNet, 25 M parameters": resnet, "GPT, 101 M parameters": gpt}


def training(variant, net, plan):
    """An endless iterator over iterations under plain DDP or a scheme; `variant` names either."""
    device, quick = torch.device(plan["device"]), plan["quick"]
    model, dataset, batch = NETS[net](quick)
    model, world = model.to(device), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    pinned = {"pin_memory": device.type == "cuda"}
    if variant == "ddp":
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        sampler = DistributedSampler(dataset, world, dist.get_rank())
        loader = DataLoader(dataset, batch_size=batch, sampler=sampler, **pinned)
    else:
        model, optimizer, loader = evenstep.prepare(
            DistributedDataParallel(model, gradient_as_bucket_view=True),
            optimizer,
            DataLoader(dataset, batch_size=batch, shuffle=True, **pinned),
            scheme=variant,
            process_group=dist.group.WORLD,
            run_dir=plan.get("run_dir"),
        )
    while True:
        for inputs, targets in loader:
            outputs = model(inputs.to(device, non_blocking=True))
            loss = gpu_tasks.loss_of(outputs, targets.to(device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loader


def wait_for(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def blocks(rank, plan, tell):
    """Wall seconds an iteration of each variant, block by block, interleaved; of the slower worker."""
    variants, device = plan["variants"], plan["device"]
    found = {}
    for net in NETS:
        runs = {variant: training(variant, net, plan) for variant in variants}
        for variant in variants:
            for _ in range(plan["warmup"]):
                next(runs[variant])
        seconds = {variant: [] for variant in variants}
        for number in range(plan["rounds"]):
            for variant in reversed(variants) if number % 2 else variants:
                wait_for(device)
                dist.barrier()
                began = time.perf_counter()
                for _ in range(plan["iterations"]):
                    next(runs[variant])
                wait_for(device)
                seconds[variant].append((time.perf_counter() - began) / plan["iterations"])
        gathered = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, seconds)
        found[net] = {
            variant: [max(each) for each in zip(*(one[variant] for one in gathered), strict=True)]
            for variant in variants
        }
        tell(f"  {net}: {plan['rounds']} rounds of {plan['iterations']} iterations")
    return found


def waits(rank, plan, tell):
    """Calls an iteration in which the host waits for the device, by variant, kind and net: from a profiler's trace."""
    found = {}
    for net in NETS:
        for variant in plan["variants"]:
            run = training(variant, net, plan)
            for _ in range(WARMUP):
                next(run)
            events = _trace(run)
            kinds = {name: sum(event["name"] == name for event in events) / TRACED for name in WAITS}
            found.setdefault(net, {})[variant] = kinds
    return found


def stopwatch(rank, plan, tell):
    """Compute seconds of each iteration by evenstep's stopwatch, and by the kernels in a profiler's trace."""
    net = next(iter(NETS))
    with tempfile.TemporaryDirectory() as folder:
        run = training("lb-bsp", net, {**plan, "run_dir": folder})
        for _ in range(WARMUP):
            next(run)
        events = _trace(run)
        next(run)  # On a device the measurement of an iteration is read in the next.
        next(run)
        wait_for(plan["device"])
        run.close()  # Its loop ends, and with it the log.
        done = {event.iteration: event.compute_seconds for event in read_events(Path(folder), kind=IterationDone)}
    ours = [done[number] for number in range(WARMUP + 1, WARMUP + TRACED) if number in done]
    return {"stopwatch": ours, "trace": _compute(events)}


def _trace(run):
    """The events of a trace over some iterations."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        with profile(activities=kinds) as profiler:
            for _ in range(TRACED):
                next(run)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        return json.loads(path.read_text())["traceEvents"]


def _compute(events):
    """Seconds from the end of an optimizer's last kernel to the end of the next backward's last, per iteration.

    The stopwatch's first mark lies behind the optimizer's kernels in the stream, its last behind backward's, before
    the optimizer's next.
    """
    kernels = sorted((event["ts"], event["dur"], event["name"]) for event in events if event.get("cat") == "kernel")
    found, began, ended = [], None, None
    stepping = False
    for at, duration, name in kernels:
        if "nccl" in name.lower():
            continue
        if "multi_tensor_apply" in name:
            if not stepping and began is not None and ended is not None:
                found.append((ended - began) / 1e6)
            stepping, began, ended = True, at + duration, None
        else:
            stepping, ended = False, at + duration
    return found
