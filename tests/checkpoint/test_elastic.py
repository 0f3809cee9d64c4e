"""A worker dies in mid-epoch, torchrun starts all again, and the run ends as if nothing had happened."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
SCRIPT = Path(__file__).parent / "scripts" / "elastic.py"
SAMPLES, GLOBAL_BATCH, EPOCHS = 50, 10, 3
SLICES = SAMPLES // GLOBAL_BATCH


@pytest.mark.multiprocess
def test_a_killed_worker_costs_what_came_after_the_last_checkpoint(tmp_path):
    killed_at = 8  # Of 5 iterations an epoch, with a checkpoint every 3: in the second epoch, 2 after a checkpoint.
    command = [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1", SCRIPT, tmp_path, "1", killed_at]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    first, second = stepped_on(tmp_path, life=0), stepped_on(tmp_path, life=1)
    # The fault took place, and torchrun started all again.
    assert len(notes(tmp_path, life=0, worker=1)) == killed_at
    assert min(second) == divmod(6, SLICES)
    # What counts is the first life up to the checkpoint, and the second from there: every sample once in each epoch.
    counted = {place: numbers for place, numbers in first.items() if place < min(second)} | second
    for epoch in range(EPOCHS):
        seen = [number for (when, _), numbers in counted.items() if when == epoch for number in numbers]
        assert sorted(seen) == list(range(SAMPLES))
    weights = json.loads((tmp_path / "weights.json").read_text())
    np.testing.assert_allclose(weights, undisturbed(), rtol=0, atol=1e-10)


def notes(folder, *, life, worker):
    return [json.loads(line) for line in (folder / f"life-{life}-worker-{worker}.jsonl").read_text().splitlines()]


def stepped_on(folder, *, life):
    """(Epoch, iteration) -> the samples that any worker stepped on in that life."""
    seen = {}
    for worker in range(2):
        for epoch, iteration, numbers in notes(folder, life=life, worker=worker):
            seen.setdefault((epoch, iteration), []).extend(numbers)
    return seen


def undisturbed():
    """The weights of the same training in one process, in plain torch."""
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    targets = inputs.sum(1, keepdim=True).sin()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(3 + epoch))
        for part in order.split(GLOBAL_BATCH):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[part]), targets[part]).backward()
            optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
