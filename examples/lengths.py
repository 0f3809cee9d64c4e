"""Trains a small recurrent net on the functions of Python's own standard library, which are of very unequal length.

Workers get functions of as many characters as their speed allows (`cost`), and the loss is a mean over characters.
Nothing is downloaded. Runs under torchrun, under `evenstep run`, or alone.
"""

import argparse
import math
import re
import sysconfig
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader

import evenstep


class Writer(torch.nn.Module):
    """Predicts the next character from those before it."""

    def __init__(self, width):
        super().__init__()
        self.character = torch.nn.Embedding(128, width // 4)
        self.memory = torch.nn.GRU(width // 4, width)
        self.head = torch.nn.Linear(width, 128)

    def forward(self, packed):
        hidden, _ = self.memory(PackedSequence(self.character(packed.data), *packed[1:]))
        return self.head(hidden.data)


def functions(longest):
    """The characters of the top-level functions of the standard library's modules."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = (path.read_bytes().decode("ascii", errors="ignore") for path in files)
    found = (each for text in texts for each in re.split(r"\n(?=def )", text)[1:])
    return [torch.frombuffer(bytearray(each[:longest].encode()), dtype=torch.uint8).long() for each in found]


def packed(texts):
    """Without padding: the characters, and those that follow them."""
    inputs, targets = ([text[part] for text in texts] for part in (slice(None, -1), slice(1, None)))
    return pack_sequence(inputs, enforce_sorted=False), pack_sequence(targets, enforce_sorted=False).data


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="functions of one worker, on average")
    parser.add_argument("--longest", type=int, default=400, help="characters of a function")
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()

    torch.manual_seed(0)
    texts = functions(options.longest)
    loader = DataLoader(texts, options.batch_size, shuffle=True, collate_fn=packed)
    model = Writer(options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, cost=[len(text) for text in texts])

    for epoch in range(options.epochs):
        for inputs, targets in loader:
            loader.weigh_by(len(targets))
            loss = functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        bits = loader.mean_over_workers(loss.item() / math.log(2), len(targets) * (loader.current.samples > 0))
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            print(f"epoch {epoch + 1}: {bits:.2f} bits per character, batch sizes {loader.batch_sizes}")


if __name__ == "__main__":
    main()
