"""The training script of `evenstep demo`: an ordinary torchrun script with evenstep's one line.

evenstep run --workers 4 demo_train.py --data digits.npz
torchrun --nproc-per-node 4 demo_train.py --data digits.npz
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep


def network() -> nn.Module:
    """Two convolutions and a linear layer, for images of 8 x 8."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """The share of the test images that the model has right."""
    images, digits = test.tensors
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == digits).sum()
    model.train()
    return int(right) / len(digits)


def main() -> None:
    """Train, and write down the test accuracy after each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=26)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluations", type=Path)
    options = parser.parse_args()

    data = {name: torch.from_numpy(array) for name, array in np.load(options.data).items()}
    train = TensorDataset(data["train_images"], data["train_digits"])
    test = TensorDataset(data["test_images"], data["test_digits"])

    torch.manual_seed(options.seed)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(train, batch_size=options.batch_size, shuffle=True)

    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, seed=options.seed)  # type: ignore[assignment]

    criterion = nn.CrossEntropyLoss()
    for epoch in range(options.epochs):
        for images, digits in loader:
            loss = criterion(model(images), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        # Every worker evaluates, so that none waits for another meanwhile.
        right = accuracy(model.module, test)
        if options.evaluations is not None and torch.distributed.get_rank() == 0:
            with options.evaluations.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"iterations": (epoch + 1) * len(loader), "accuracy": right}) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
