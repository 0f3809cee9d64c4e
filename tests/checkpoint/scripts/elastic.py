"""Trains under torchrun and saves every 3 iterations; once, one of two workers kills itself in mid-epoch.

That is worker 1 of the host `only`, or of two hosts the worker of `leaves`, with its agent. Each worker
notes in which life, and with how many others, it stepped on which samples; in the end worker 0 notes the weights.
"""

import json
import os
import signal
import sys
from pathlib import Path

import support.lean_torch  # noqa: F401
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import evenstep

SAMPLES, GLOBAL_BATCH, EPOCHS = 50, 10, 3


def main(folder, host):
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dataset = TensorDataset(torch.arange(SAMPLES), inputs, inputs.sum(1, keepdim=True).sin())
    loader = DataLoader(dataset, batch_size=5, shuffle=True)
    model, optimizer, loader = evenstep.prepare(
        model, optimizer, loader, global_batch_size=GLOBAL_BATCH, seed=3, timeout=60, run_dir=folder / "run"
    )
    evenstep.checkpoint.restore(folder / "checkpoints", model, optimizer, loader)
    rank, workers = dist.get_rank(), dist.get_world_size()
    life = [len(list(folder.glob("life-*-worker-0.jsonl")))]
    dist.broadcast_object_list(life)
    killed = folder / "killed"
    dies = workers == 2 and not killed.exists() and (host == "leaves" or (host == "only" and rank == 1))
    with (folder / f"life-{life[0]}-worker-{rank}.jsonl").open("a") as notes:
        for epoch in range(loader.epoch, EPOCHS):
            for numbers, batch, targets in loader:
                share = loader.current
                loss = torch.nn.functional.mse_loss(model(batch), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                stepped = [epoch, share.iteration, workers, numbers[: share.samples].tolist()]
                print(json.dumps(stepped), file=notes, flush=True)
                if dies and loader.iteration == 8:
                    killed.touch()
                    if host == "leaves":
                        os.kill(os.getppid(), signal.SIGKILL)
                    os.kill(os.getpid(), signal.SIGKILL)
                if loader.iteration % 3 == 0:
                    evenstep.checkpoint.save(folder / "checkpoints", model, optimizer, loader)
    if rank == 0:
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
        (folder / "weights.json").write_text(json.dumps(weights))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
