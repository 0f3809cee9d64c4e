"""Trains with told speeds and notes its sizes; saves its state in mid-epoch, or continues from it."""

import json
import os
import sys
from pathlib import Path

import support.lean_torch  # noqa: F401
import torch
from support.told_speeds import told
from torch.utils.data import DataLoader, TensorDataset

import evenstep

folder = Path(sys.argv[1])
state = folder / f"state-{os.environ['RANK']}.json"
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dataset = TensorDataset(torch.randn(24 * 20, 4))
model, optimizer, loader = evenstep.prepare(
    model, optimizer, DataLoader(dataset, batch_size=24), scheme=told("lb-bsp", [1, 3]), global_batch_size=24
)
if saved := state.exists():
    loader.load_state_dict(json.loads(state.read_text()))
with (folder / f"worker-{os.environ['RANK']}.jsonl").open("a") as notes:
    for number, (inputs,) in enumerate(loader):
        print(json.dumps(loader.current.sizes.tolist()), file=notes, flush=True)
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if not saved and number == 14:
            state.write_text(json.dumps(loader.state_dict()))
            break
loader.close()
