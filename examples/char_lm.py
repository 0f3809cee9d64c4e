"""Trains a small recurrent net to write Python, character by character, on the text of Python's own standard library.

Nothing is downloaded. Runs under torchrun, under `evenstep run`, or alone.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, default_collate

import evenstep

CHARACTERS = 128


class Text(Dataset):
    """Pieces of a text and, for each character, the one that follows it."""

    def __init__(self, characters, context):
        self.characters = characters
        self.context = context

    def __len__(self):
        return (len(self.characters) - 1) // self.context

    def __getitem__(self, index):
        start = index * self.context
        piece = self.characters[start : start + self.context + 1].long()
        return piece[:-1], piece[1:]


class Writer(torch.nn.Module):
    """Predicts the next character from those before it."""

    def __init__(self, width, layers):
        super().__init__()
        self.character = torch.nn.Embedding(CHARACTERS, width // 4)
        self.memory = torch.nn.GRU(width // 4, width, layers, batch_first=True)
        self.head = torch.nn.Linear(width, CHARACTERS)

    def forward(self, characters):
        hidden, _ = self.memory(self.character(characters))
        return self.head(hidden)


def standard_library():
    """The ASCII characters of the standard library's top-level modules."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in files)
    return torch.frombuffer(bytearray(text.encode("ascii", errors="ignore")), dtype=torch.uint8)


def bits(model, characters):
    """The loss in bits per character: how many yes-or-no questions the next character is worth."""
    inputs, targets = characters
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / math.log(2)


@torch.no_grad()
def write_line(model, prompt, generator):
    """The prompt and the model's continuation, up to the end of the line or 60 characters."""
    line = list(prompt.encode())
    while len(line) < 60:
        chances = model(torch.tensor([line]))[0, -1].mul(1.25).softmax(dim=0)
        drawn = int(torch.multinomial(chances, 1, generator=generator))
        if drawn == ord("\n"):
            break
        line.append(drawn)
    return bytes(line).decode()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--global-batch-size", type=int, default=128, help="pieces of text over all workers")
    parser.add_argument("--context", type=int, default=64, help="characters of a piece")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--report-every", type=int, default=10)
    parser.add_argument("--scheme", help="such as bsp; by default the launcher's, or lb-bsp")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    text = standard_library()
    last = len(text) // 20
    held_out = Text(text[-last:], options.context)
    loader = DataLoader(Text(text[:-last], options.context), batch_size=1, shuffle=True)
    model = Writer(options.width, options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    model, optimizer, loader = evenstep.prepare(
        model,
        optimizer,
        loader,
        scheme=options.scheme,
        global_batch_size=options.global_batch_size,
        seed=options.seed,
    )
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0

    for batch in endlessly(loader):
        loss = bits(model, batch)
        optimizer.zero_grad()
        loss.backward()
        if loader.synchronises:  # Always true, except between micro-batches.
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if first and loader.synchronises and loader.iteration % options.report_every == 0:
            print(
                f"iteration {loader.iteration}: {loss.item():.2f} bits per character, batch sizes {loader.batch_sizes}"
            )
        if loader.iteration == options.iterations:
            break
    loader.settle()  # Averages models that train separately (local-sgd).

    if first:
        model.eval()
        pieces = [held_out[index] for index in range(0, len(held_out), len(held_out) // 100)]
        with torch.no_grad():
            loss = bits(model.module, default_collate(pieces))
        print(f"on text held out: {loss.item():.2f} bits per character")
        line = write_line(model.module, "def ", torch.Generator().manual_seed(options.seed))
        print(f"it writes: {line!r}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def endlessly(loader):
    while True:
        yield from loader


if __name__ == "__main__":
    main()
