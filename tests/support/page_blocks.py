"""Runs the Python blocks of pages of docs/: evenstep run --workers N -m support.page_blocks PAGE..., below docs/.

A block stands for a part of a script. What it leaves open is made up here: small models and data, new for each block.
Blocks marked `py` are excerpts of examples, which tests of their own run.
"""

import gzip
import json
import os
import re
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import evenstep
import support.lean_torch  # noqa: F401
from evenstep.core.load.shares import shares_of
from evenstep.core.sync import Command, Push
from evenstep.core.sync.roster import Roster, commit_alone
from support.made_log import write_log

DOCS = Path(__file__).parents[2] / "docs"
REFUSED = {"schemes/batch-sizes.md": "gpu:NVIDIA GeForce RTX 3090"}
"""Pages whose block no two workers on CPUs can run, and what its error names."""


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 3)])

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return inputs


def blocks_of(page):
    """The Python blocks of a page; those in lists are indented."""
    found = re.finditer(r"^( *)```python\n(.*?)^\1```", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{block[1]}", "", block[2], flags=re.MULTILINE) for block in found]


def names():
    """What scripts have before they come to evenstep."""
    torch.manual_seed(0)
    model = Net()
    data = TensorDataset(torch.randn(64, 4), torch.randint(3, (64,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Path("texts").mkdir(exist_ok=True)
    path = Path("texts/one.jsonl.gz")
    with gzip.open(path, "wt") as file:
        file.writelines(f"{json.dumps([number])}\n" for number in range(64))
    return {
        "Annotated": Annotated, "Command": Command, "DataLoader": DataLoader, "Push": Push, "Roster": Roster,
        "accuracy": 0.5, "commit_alone": commit_alone, "criterion": torch.nn.functional.cross_entropy,
        "cross_entropy": torch.nn.functional.cross_entropy, "dataclass": dataclass, "dist": dist, "epochs": 2,
        "evenstep": evenstep, "field": field, "fully_shard": fully_shard, "global_batch_size": 16, "gzip": gzip,
        "iterations": 8, "json": json, "length": 64, "lengths": [64], "loader": DataLoader(data, batch_size=16),
        "loss": 0.5, "loss_of": lambda model, *batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]),
        "first": DataLoader(data, batch_size=16), "second": DataLoader(data, batch_size=16), "model": model,
        "my_batch": lambda positions: data[torch.as_tensor(positions)], "np": np, "npt": npt, "optimizer": optimizer,
        "policies": evenstep.policies, "log": lambda values, step: None,
        "run_dir": write_log(Path("run"), [(0.1, 0.1, 0.1)]), "paths": [path], "parts": 1,
        "rank": int(os.environ["RANK"]), "rollouts": data[:8][0].split((1, 2, 5)), "speeds": None,
        "sum_of_token_losses": lambda model, rollouts: model(torch.cat(rollouts)).sum(), "tokens_of_all_rollouts": 8,
        "workers": 2,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 4), "shares_of": shares_of,
        "texts": ["text"] * 64, "text": (DOCS.parent / "examples/clusters/four-gpus.toml").read_text(),
        "timedelta": timedelta, "tokenize": torch.tensor, "torch": torch,
    }  # fmt: skip


def names_of_any_framework(block, stack):
    """What a worker of another framework has: collectives, an optimizer, gradients, and servers."""
    rank = dist.get_rank()
    started = None, None
    if rank == 0 and "servers=addresses" in block:
        servers = stack.enter_context(evenstep.start_servers("ssp:bound=3", workers=4))
        started = (servers.addresses, servers.secret)
    told = [started]
    dist.broadcast_object_list(told)

    def all_gather(row):
        rows = [None] * 4
        dist.all_gather_object(rows, row)
        return rows

    def sum_over_workers(array):
        dist.all_reduce(summed := torch.tensor(array))
        return summed.numpy()

    balancer = evenstep.Balancer("lb-bsp", rank=rank, workers=4, all_gather=all_gather, length=64, global_batch_size=16)
    return {
        "addresses": told[0][0], "all_gather": all_gather, "balancer": balancer, "bias": np.zeros(3),
        "data": np.ones((64, 4)), "epoch": 0, "epochs": 2, "evenstep": evenstep,
        "gradient_of_the_mean_loss": lambda rows: rows.mean(axis=0),
        "gradients_of_the_mean_loss": lambda weights, rows: [np.ones_like(each) for each in weights],
        "matrix": np.zeros((4, 3)), "optimizer_step": lambda gradient: None, "rank": rank, "secret": told[0][1],
        "state": balancer.state_dict(), "sum_over_workers": sum_over_workers, "weights": np.zeros(4),
    }  # fmt: skip


def prepared(given):
    """The same with a session that has the model and its optimizer, and with a loader of it."""
    session = evenstep.Session()
    given["session"] = session
    for name in ("model", "optimizer", "loader"):
        given[name] = getattr(session, name)(given[name])
    return given


def run(page, stack):
    """Run the blocks one after the other. What a block defines by `class` or `def` is there for those after it."""
    defined = {}
    for number, block in enumerate(blocks_of(page)):
        given = names_of_any_framework(block, stack) if page == "any-framework.md" else names()
        if not re.search(r"evenstep\.(prepare|Session)\(", block) and re.search(
            r"\b(session|loader|checkpoint)\.", block
        ):
            given = prepared(given)
        space = {**given, **defined, "__name__": "page"}
        if "with evenstep.start_servers" not in block or os.environ["RANK"] == "0":  # One process starts them.
            code = compile(block, f"{page}, block {number}", "exec")
            with pytest.raises(evenstep.ConfigError, match=REFUSED[page]) if page in REFUSED else nullcontext():
                exec(code, space)
        defined |= {name: value for name, value in space.items() if getattr(value, "__module__", "") == "page"}
    print(f"{number + 1} blocks of {page} ran", flush=True)


def main(pages):
    """Run the pages one after the other."""
    sys.modules["page"] = sys.modules[__name__]  # Dataclasses ask for the module of what they are given.
    with ExitStack() as stack:
        if "any-framework.md" in pages:
            dist.init_process_group("gloo", timeout=timedelta(minutes=2))
            stack.callback(dist.destroy_process_group)  # Its threads must not outlive the interpreter.
        for page in pages:
            run(page, stack)


if __name__ == "__main__":
    main(sys.argv[1:])
