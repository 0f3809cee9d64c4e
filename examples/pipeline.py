"""Trains a perceptron on handwritten digits, each replica a pipeline of two stages."""

import argparse
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional

import evenstep

STAGES, MICRO_BATCH, GLOBAL_BATCH = 2, 8, 256


def batches(balancer, epoch, stages):
    """The samples of this replica in each iteration: its first stage is handed them out, and hands them on."""
    shares = balancer.epoch(epoch) if balancer else iter(())
    while True:
        indices = torch.full((GLOBAL_BATCH,), -1)
        if (share := next(shares, None)) is not None:
            indices[: share.samples] = torch.from_numpy(share.indices)
        dist.broadcast(indices, group=stages, group_src=0)
        if indices[0] < 0:  # The end of the epoch.
            return
        yield indices[indices >= 0]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--slow", type=float, default=1.0, help="make the last replica this many times slower")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // STAGES, STAGES), mesh_dim_names=("dp", "pp"))
    replicas, stages, first = mesh["dp"], mesh["pp"].get_group(), mesh["pp"].get_local_rank() == 0
    slowness = options.slow if replicas.get_local_rank() == replicas.size() - 1 else 1.0
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, options.width), torch.nn.ReLU(), torch.nn.Linear(options.width, 10)
    module = torch.nn.Sequential(*layers[:2]) if first else layers[2]
    stage = PipelineStage(module, int(not first), STAGES, torch.device("cpu"), group=stages)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

    def all_gather(row):
        rows = [torch.empty(len(row), dtype=torch.uint8) for _ in range(replicas.size())]
        dist.all_gather(rows, torch.frombuffer(bytearray(row), dtype=torch.uint8), group=replicas.get_group())
        return [each.numpy().tobytes() for each in rows]

    balancer = None
    if first:  # Only there: it begins before the other stages, and ends after them.
        balancer = evenstep.Balancer(
            f"lb-bsp:multiple={MICRO_BATCH},minimum={STAGES * MICRO_BATCH}",  # 1F1B needs one for each stage.
            rank=replicas.get_local_rank(),
            workers=replicas.size(),
            all_gather=all_gather,
            length=len(images),
            global_batch_size=GLOBAL_BATCH,
            drop_last=True,  # The last iteration may not be of whole micro-batches.
        )

    count = 0
    for epoch in range(options.epochs):
        for indices in batches(balancer, epoch, stages):
            losses = []
            if len(indices) != count * MICRO_BATCH:
                count = len(indices) // MICRO_BATCH
                schedule = Schedule1F1B(stage, count, loss_fn=functional.cross_entropy)
            optimizer.zero_grad()
            with balancer.compute() if first else nullcontext():
                began = time.perf_counter()
                if first:
                    schedule.step(images[indices])
                else:
                    schedule.step(target=labels[indices], losses=losses)
                time.sleep((slowness - 1) * (time.perf_counter() - began))
            for parameter in module.parameters():
                parameter.grad *= len(indices) / GLOBAL_BATCH
                dist.all_reduce(parameter.grad, group=replicas.get_group())
            optimizer.step()
        loss = sum(losses, torch.zeros(())) * MICRO_BATCH / GLOBAL_BATCH  # 0 on the first stages.
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.3f}, batch sizes {balancer.sizes}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
