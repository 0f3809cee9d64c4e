"""Trains a small GPT on the functions of Python's own standard library, which have different lengths.

The loss is a mean over tokens, so each worker's gradient counts by its tokens; two batches make one step.
"""

import argparse
import math
import os
import re
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import evenstep

NOTHING = -1  # Fills up sequences that are shorter than the longest in the batch.


class GPT(torch.nn.Module):
    def __init__(self, context, width=128, heads=4, layers=2):
        super().__init__()
        self.token, self.position = torch.nn.Embedding(128, width), torch.nn.Embedding(context, width)
        block = torch.nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.blocks = torch.nn.TransformerEncoder(block, layers, torch.nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, 128)

    def forward(self, tokens):
        hidden = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        future = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.blocks(hidden, mask=future, is_causal=True))


def functions(context):
    """The functions and methods of the standard library's top-level modules, as ASCII codes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in files)
    found = re.findall(r"^ *def .*\n(?:(?! *def ).*\n){1,40}", text.encode("ascii", "ignore").decode(), re.MULTILINE)
    return [torch.tensor(list(each.encode())[: context + 1]) for each in found]


def padded(sequences):
    whole = pad_sequence(sequences, batch_first=True, padding_value=NOTHING)
    return whole[:, :-1].clamp(min=0), whole[:, 1:]


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=60, help="of the optimizer, of two batches each")
parser.add_argument("--batch-size", type=int, default=24, help="functions in a batch, of one worker")
parser.add_argument("--context", type=int, default=128, help="characters of a function")
options = parser.parse_args()
torch.manual_seed(0)
model = GPT(options.context)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=options.steps)
loader = DataLoader(functions(options.context), options.batch_size, shuffle=True, drop_last=True, collate_fn=padded)
model, optimizer, loader = evenstep.prepare(model, optimizer, loader)
for inputs, targets in (batch for _ in range(10_000) for batch in loader):
    loader.weigh_by((targets != NOTHING).sum())
    last = loader.iteration % 2 == 0
    with nullcontext() if last else model.no_sync(), torch.autocast("cpu", torch.bfloat16):
        loss = functional.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten(), ignore_index=NOTHING)
        (loss / 2).backward()
    if not last:
        continue
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if (step := loader.iteration // 2) % 10 == 0:
        mean = loader.mean_over_workers(loss.item() / math.log(2), int((targets != NOTHING).sum()))
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"step {step}: {mean:.2f} bits per character, batch sizes {loader.batch_sizes}")
    if step == options.steps:
        break
