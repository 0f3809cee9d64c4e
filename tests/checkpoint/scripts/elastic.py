"""Trains under torchrun and saves every 3 iterations; in its first life one worker kills itself in mid-epoch.

Each worker notes, as it steps, which samples it stepped on, and in the end worker 0 notes the weights.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import evenstep

SAMPLES, GLOBAL_BATCH, EPOCHS = 50, 10, 3


def main(folder, kill_worker, kill_at):
    rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    dataset = TensorDataset(torch.arange(SAMPLES), inputs, inputs.sum(1, keepdim=True).sin())
    loader = DataLoader(dataset, batch_size=5, shuffle=True)
    model, optimizer, loader = evenstep.prepare(
        model, optimizer, loader, global_batch_size=GLOBAL_BATCH, seed=3, timeout=60
    )
    evenstep.checkpoint.restore(folder / "checkpoints", model, optimizer, loader)
    done = 0
    with (folder / f"life-{life}-worker-{rank}.jsonl").open("a") as notes:
        for epoch in range(loader.epoch, EPOCHS):
            for numbers, batch, targets in loader:
                share = loader.current
                loss = torch.nn.functional.mse_loss(model(batch), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += 1
                stepped = [epoch, share.iteration, numbers[: share.samples].tolist()]
                print(json.dumps(stepped), file=notes, flush=True)
                if (rank, life, done) == (kill_worker, 0, kill_at):
                    os.kill(os.getpid(), signal.SIGKILL)
                if done % 3 == 0:
                    evenstep.checkpoint.save(folder / "checkpoints", model, optimizer, loader)
    if rank == 0:
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
        (folder / "weights.json").write_text(json.dumps(weights))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
