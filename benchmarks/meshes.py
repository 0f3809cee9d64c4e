"""What sizes by speed gain where each replica is split over two processes by tensor parallelism, under HSDP and FSDP2.

Two replicas, the second three times slower: each of its processes sleeps longer for every sample that it computes on.
HSDP has one shard here, so it sums gradients as DDP does. The rate is that of the optimizer's steps after the first
ones. The variants take turns.
"""

import sys
import time
import warnings

import torch
import torch.distributed as dist
from harness import record
from harness.workers import run_workers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

REPLICAS, PARTS, BATCH, SLOWNESS, PER_SAMPLE = 2, 2, 32, (1, 3), 0.008
STEPS, WARMUP, PLAIN, FEATURES, WIDTH = 34, 14, 12, 16, 64
SAMPLES = REPLICAS * BATCH
IDEAL = sum(1 / (slow * PER_SAMPLE) for slow in SLOWNESS)
MESHES = {
    "HSDP": ((REPLICAS, 1, PARTS), ("replicate", "shard", "tp")),
    "FSDP2": ((REPLICAS, PARTS), ("shard", "tp")),
}


class Waiting(torch.nn.Module):
    """Takes a time in proportion to the samples, as a device does."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, inputs):
        time.sleep(self.seconds * len(inputs))
        return inputs


def main():
    parser = record.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    steps = WARMUP + 4 if options.quick else STEPS
    repetitions = 1 if options.quick else options.repetitions
    rates = {(model, even): [] for model in MESHES for even in (False, True)}
    for repetition in range(repetitions):
        for model, even in rates:
            argument = (model, even, steps, options.seed)
            rate = run_workers(REPLICAS * PARTS, _measure, argument, record.console.print)
            rates[model, even].append(rate)
            way = "with evenstep" if even else "plain"
            record.console.print(f"  {repetition + 1}/{repetitions} {model} x TP, {way}: {rate:.1f} samples/s")
    figures = [
        *(
            record.figure(f"{model} x TP, of the ideal", [rate / IDEAL for rate in rates[model, True]], goal=">= 0.93")
            for model in MESHES
        ),
        *(
            record.figure(
                f"{model} x TP, of the ideal with its own time per step",
                [ours / _ideal(plain) for ours, plain in zip(rates[model, True], rates[model, False], strict=True)],
            )
            for model in MESHES
        ),
        *(
            record.figure(
                f"{model} x TP, times {model} x TP without evenstep",
                [ours / plain for ours, plain in zip(rates[model, True], rates[model, False], strict=True)],
            )
            for model in MESHES
        ),
    ]
    record.publish(
        "meshes",
        f"{REPLICAS} replicas of {PARTS} processes each, speeds 1:1/3",
        options,
        config={
            "replicas": REPLICAS,
            "processes_per_replica": PARTS,
            "batch_size": BATCH,
            "slowness": SLOWNESS,
            "seconds_per_sample": PER_SAMPLE,
            "steps": steps,
            "warmup": WARMUP,
            "steps_without_evenstep": min(steps, PLAIN),
            "repetitions": repetitions,
            "scheme": "lb-bsp",
        },
        figures=figures,
        raw={f"{model}, {'with' if even else 'without'}": values for (model, even), values in rates.items()},
    )
    return 0


def _ideal(plain):
    """The ideal if a step takes as long beside computing as one of plain PyTorch, which waits for the slow replica."""
    own = SAMPLES / plain - max(SLOWNESS) * BATCH * PER_SAMPLE
    return SAMPLES / (SAMPLES / IDEAL + own)


def _measure(rank, argument, tell):
    """Samples per second of all replicas after the warm-up."""
    kind, even, steps, seed = argument
    warmup = WARMUP if even else WARMUP // 3  # Without evenstep no sizes have to settle.
    steps = steps if even else min(steps, PLAIN)
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    shape, names = MESHES[kind]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    replica = mesh[names[0]].get_local_rank()
    layers = torch.nn.Linear(FEATURES, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1)
    model = torch.nn.Sequential(layers[0], Waiting(SLOWNESS[replica] * PER_SAMPLE), *layers[1:])
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "3": RowwiseParallel()})
    fully_shard(model, mesh=mesh[names[:-1]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    samples = SAMPLES * steps
    data = TensorDataset(torch.randn(samples, FEATURES), torch.randn(samples, 1))
    if even:
        import evenstep

        loader = DataLoader(data, batch_size=BATCH)
        model, optimizer, loader = evenstep.prepare(
            model, optimizer, loader, scheme="lb-bsp", mesh=mesh, data_dims=names[:-1]
        )
    else:
        sampler = DistributedSampler(data, REPLICAS, replica, shuffle=False)
        loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    stepped = []
    hook = register_optimizer_step_post_hook(lambda *_: stepped.append(time.perf_counter()))
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    hook.remove()
    dist.barrier()
    assert len(stepped) == steps, len(stepped)
    measured = stepped[warmup:]
    return SAMPLES * (len(measured) - 1) / (measured[-1] - measured[0])


if __name__ == "__main__":
    sys.exit(main())
