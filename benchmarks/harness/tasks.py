"""Small tasks to train for real: handwritten digits, and the next letter of a text that comes with Python."""

from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import torch

LETTERS = " abcdefghijklmnopqrstuvwxyz.,'_("


@dataclass(frozen=True, kw_only=True)
class Task:
    """Inputs and classes, of one hidden layer's network. `source` says what the data are."""

    name: str
    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]
    hidden: int
    classes: int
    source: str

    def network(self):
        """With weights from torch's random state."""
        return torch.nn.Sequential(
            torch.nn.Linear(self.train[0].shape[1], self.hidden), torch.nn.ReLU(),
            torch.nn.Linear(self.hidden, self.classes),
        )  # fmt: skip


def digits(*, samples=1200, hidden=64, noise=0.0):
    """8 x 8 digits; the test set is what is left. Of the training labels, the part `noise` is drawn at random."""
    from sklearn.datasets import load_digits

    data, random = load_digits(), np.random.default_rng(0)
    images = torch.tensor((data.images / 16).astype(np.float32).reshape(-1, 64))
    order = random.permutation(len(images))
    train, test = order[:samples], order[samples:]
    truth = data.target.copy()
    wrong = train[random.random(samples) < noise]
    truth[wrong] = random.integers(10, size=len(wrong))
    return Task(
        name="digits", hidden=hidden, classes=10, source="sklearn.datasets.load_digits",
        train=(images[train], torch.tensor(truth[train])), test=(images[test], torch.tensor(data.target[test])),
    )  # fmt: skip


def letters_of_help():
    """The text of Python's own help pages as numbers of 32 letters, and where it is from."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics)).lower()
    codes = np.array([LETTERS.find(letter) for letter in " ".join(text.split())])
    return codes[codes >= 0], f"pydoc_data.topics, SHA-256 {sha256(text.encode()).hexdigest()}"


def letters(*, samples=6400, context=2, hidden=24):
    """The next of 32 letters from the last few, in the text of Python's own help pages."""
    codes, source = letters_of_help()
    windows = np.lib.stride_tricks.sliding_window_view(codes, context + 1)
    taken = np.random.default_rng(0).permutation(len(windows))[: samples + 4000]
    inputs = np.eye(len(LETTERS), dtype=np.float32)[windows[taken, :context]].reshape(len(taken), -1)
    inputs, truth = torch.from_numpy(inputs), torch.from_numpy(windows[taken, context].copy())
    return Task(
        name="letters", hidden=hidden, classes=len(LETTERS), source=source,
        train=(inputs[:samples], truth[:samples]), test=(inputs[samples:], truth[samples:]),
    )  # fmt: skip
