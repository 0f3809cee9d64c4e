"""Trains a small GPT in a loop like nanoGPT's, which never ends and makes its own batches: random pieces of a text."""

import argparse
import itertools
import math
import os
import sysconfig
from pathlib import Path

import torch
from torch.nn import functional

import evenstep


class GPT(torch.nn.Module):
    def __init__(self, context, width=64, heads=4, layers=2):
        super().__init__()
        self.token, self.position = torch.nn.Embedding(128, width), torch.nn.Embedding(context, width)
        block = torch.nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = torch.nn.TransformerEncoder(block, layers, torch.nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 128)

    def forward(self, tokens, targets):
        hidden = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        future = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits = self.head(self.blocks(hidden, mask=future, is_causal=True))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(data):
    rows = len(next(shares).positions) if model.training else options.batch_size
    starts = torch.randint(len(data) - options.context - 1, (rows, 1))
    pieces = data[starts + torch.arange(options.context + 1)].long()
    return pieces[:, :-1], pieces[:, 1:]


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch(validation)).item() for _ in range(4)]
    model.train()
    return sum(losses) / len(losses) / math.log(2)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=100, help="of the optimizer, of two batches each")
parser.add_argument("--batch-size", type=int, default=32, help="pieces in a batch, of one worker on average")
parser.add_argument("--context", type=int, default=64, help="characters of a piece")
options = parser.parse_args()
rank, workers = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
characters = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in files).encode("ascii", "ignore")
text = torch.frombuffer(bytearray(characters), dtype=torch.uint8)
train, validation = text[: -len(text) // 10], text[-len(text) // 10 :]
torch.manual_seed(0)
model = GPT(options.context)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
session = evenstep.Session()
model, optimizer = session.model(model), session.optimizer(optimizer)
endless = session.shares(None, options.batch_size * workers)
shares = iter(endless)
torch.manual_seed(1 + rank)  # Each worker draws different pieces.
batch = get_batch(train)
for step in itertools.count(1):
    for micro_step in range(2):
        model.require_backward_grad_sync = micro_step == 1
        loss = model(*batch) / 2
        batch = get_batch(train)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0 and rank == 0:
        print(f"step {step}: {estimate_loss():.2f} bits per character, batch sizes {endless.batch_sizes}")
    if step == options.steps:
        break
session.close()
