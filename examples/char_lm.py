"""Trains a small transformer to write Python, character by character, on the text of Python's own standard library.

Nothing is downloaded. Runs under torchrun, under `evenstep run`, or alone.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import evenstep

CHARACTERS = 128


class Text(Dataset):
    """Pieces of a text with, for each character, the one that follows it."""

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

    def __init__(self, width, layers, context):
        super().__init__()
        self.context = context
        self.character = torch.nn.Embedding(CHARACTERS, width)
        self.place = torch.nn.Parameter(0.02 * torch.randn(context, width))
        layer = torch.nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, CHARACTERS)

    def forward(self, characters):
        length = characters.shape[1]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.layers(self.character(characters) + self.place[:length], mask=mask, is_causal=True)
        return self.head(self.norm(hidden))


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
    """The prompt and what the model writes after it, to the end of the line or 60 characters."""
    line = list(prompt.encode())
    while len(line) < 60:
        chances = model(torch.tensor([line[-model.context :]]))[0, -1].mul(1.25).softmax(dim=0)
        drawn = int(torch.multinomial(chances, 1, generator=generator))
        if drawn == ord("\n"):
            break
        line.append(drawn)
    return bytes(line).decode()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--global-batch-size", type=int, default=32, help="pieces of text over all workers")
    parser.add_argument("--context", type=int, default=96, help="characters of a piece")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--report-every", type=int, default=20)
    parser.add_argument("--scheme", help="such as bsp; by default the launcher's, or lb-bsp")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    text = standard_library()
    last = len(text) // 20
    held_out = Text(text[-last:], options.context)
    loader = DataLoader(Text(text[:-last], options.context), batch_size=1, shuffle=True)
    model = Writer(options.width, options.layers, options.context)
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
        optimizer.step()
        if first and loader.iteration % options.report_every == 0:
            print(
                f"iteration {loader.iteration}: {loss.item():.2f} bits per character, batch sizes {loader.batch_sizes}"
            )
        if loader.iteration == options.iterations:
            break

    if first:
        model.eval()
        with torch.no_grad():
            held = next(iter(DataLoader(held_out, batch_size=64)))
            print(f"on text held out: {bits(model.module, held).item():.2f} bits per character")
        print(f"it writes: {write_line(model.module, 'def ', torch.Generator().manual_seed(options.seed))}")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def endlessly(loader):
    while True:
        yield from loader


if __name__ == "__main__":
    main()
