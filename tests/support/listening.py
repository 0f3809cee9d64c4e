"""A script whose first worker writes down what all processes of its run listen on."""

import json
import os
import sys
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import lean_torch, training  # noqa: F401

model, optimizer, loader = training.prepared(training.Run())
for number, (inputs, targets) in enumerate(loader):
    if os.environ["RANK"] == "0" and number == 0:
        launcher = psutil.Process().parents()[1]  # Behind the keeper.
        processes = [launcher, *launcher.children(recursive=True)]
        sockets = [each for process in processes for each in process.net_connections("inet")]
        found = [tuple(each.laddr) for each in sockets if each.status == psutil.CONN_LISTEN]
        Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
loader.close()
