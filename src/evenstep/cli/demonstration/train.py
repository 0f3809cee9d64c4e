"""The training script of `evenstep demo`: a torchrun script with evenstep's one line, for several schemes.

evenstep run --workers 4 train.py
torchrun --nproc-per-node 4 train.py
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.cli.demonstration.setting import folder_of, read_digits


def network() -> nn.Module:
    """Make two convolutions and a linear layer, for images of 8 x 8."""
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
    """Return the share of the test images that the model gets right."""
    images, digits = test.tensors
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == digits).sum()
    model.train()
    return int(right) / len(digits)


def train(options: argparse.Namespace, scheme: str | None, data: dict[str, torch.Tensor]) -> None:
    """Train under one scheme, and note the loss and, after each epoch, the test accuracy."""
    train_data = TensorDataset(data["train_images"], data["train_digits"])
    test_data = TensorDataset(data["test_images"], data["test_digits"])

    torch.manual_seed(options.seed)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(train_data, batch_size=options.batch_size, shuffle=True)

    run_dir = None if options.run_dirs is None else options.run_dirs / folder_of(scheme or "run")
    model, optimizer, loader = evenstep.prepare(  # type: ignore[assignment]
        model, optimizer, loader, scheme=scheme, seed=options.seed, run_dir=run_dir
    )

    criterion = nn.CrossEntropyLoss()
    for _ in range(options.epochs):
        for images, digits in loader:
            loss = criterion(model(images), digits)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loader.note(loss=loss)  # type: ignore[attr-defined]
        # Every worker evaluates, so that none waits for another.
        loader.note(accuracy=accuracy(model.module, test_data))  # type: ignore[attr-defined]
    torch.distributed.barrier()
    loader.close()  # type: ignore[attr-defined]


def main() -> None:
    """Train under each scheme in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=26)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schemes", nargs="+", default=[None])
    parser.add_argument("--run-dirs", type=Path)
    options = parser.parse_args()

    torch.distributed.init_process_group("gloo")
    data = {name: torch.from_numpy(array) for name, array in read_digits().items()}
    for scheme in options.schemes:
        train(options, scheme, data)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
