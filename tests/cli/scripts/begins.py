"""Trains with told speeds and notes its sizes.

With a second argument, `dies`: worker 1 is killed in the first life; `stops`: its state is saved in mid-epoch, or
restored if there is one.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from support import lean_torch  # noqa: F401
from support.told_speeds import told
from torch.utils.data import DataLoader, TensorDataset

import evenstep

folder, how = Path(sys.argv[1]), sys.argv[2:]
state = folder / f"state-{os.environ['RANK']}.json"
life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dataset = TensorDataset(torch.randn(24 * 20, 4))
slowdowns = [1, 3, *[1] * (int(os.environ["WORLD_SIZE"]) - 2)]
model, optimizer, loader = evenstep.prepare(
    model, optimizer, DataLoader(dataset, batch_size=24), scheme=told("lb-bsp", slowdowns), global_batch_size=24
)
if state.exists():
    loader.load_state_dict(json.loads(state.read_text()))
with (folder / f"life-{life}-worker-{os.environ['RANK']}.jsonl").open("a") as notes:
    for number, (inputs,) in enumerate(loader):
        print(json.dumps(loader.current.sizes.tolist()), file=notes, flush=True)
        if how == ["dies"] and life == 0 and os.environ["RANK"] == "1" and number == 14:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if how == ["stops"] and number == 14:
            state.write_text(json.dumps(loader.state_dict()))
            break
loader.close()
