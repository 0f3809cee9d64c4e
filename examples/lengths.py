"""Trains a small net on the functions of Python's own standard library, whose lengths differ widely.

Each worker gets as many characters as its speed allows (`cost`), and the loss is a mean over characters.
Nothing is downloaded. Runs under torchrun, under `evenstep run`, or alone.
"""

import argparse
import math
import re
import sysconfig
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

import evenstep

BEFORE = 8
"""The number of characters from which the next one is predicted."""


def writer(width):
    """Predicts the next character from those before it."""
    embedding = torch.nn.Embedding(128, 16)
    hidden = torch.nn.Linear(16 * BEFORE, width)
    return torch.nn.Sequential(embedding, torch.nn.Flatten(), hidden, torch.nn.ReLU(), torch.nn.Linear(width, 128))


def functions(longest):
    """The characters of the top-level functions of the standard library's modules."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = (path.read_bytes().decode("ascii", errors="ignore") for path in files)
    found = (each for text in texts for each in re.split(r"\n(?=def )", text)[1:])
    return [torch.frombuffer(bytearray(each[:longest].encode()), dtype=torch.uint8).long() for each in found]


def windows(texts):
    """Each character of the texts, and those before it."""
    rows = torch.cat([text.unfold(0, BEFORE + 1, 1) for text in texts])
    return rows[:, :-1], rows[:, -1]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="functions of one worker, on average")
    parser.add_argument("--longest", type=int, default=2000, help="characters of a function")
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()

    torch.manual_seed(0)
    texts = functions(options.longest)
    loader = DataLoader(texts, options.batch_size, shuffle=True, collate_fn=windows)
    model = writer(options.width)
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
