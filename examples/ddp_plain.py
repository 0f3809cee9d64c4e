"""Trains a small convolution net on scikit-learn's handwritten digits, under torchrun or alone."""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def digits(seed):
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    train, test = train_test_split(range(len(labels)), test_size=0.2, random_state=seed, stratify=labels)
    return TensorDataset(images[train], labels[train]), images[test], labels[test]


def network():
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(64, 64, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 4 * 4, 10),
    )


def accuracy(model, images, labels):
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return right


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="of one worker")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    torch.manual_seed(options.seed)
    dataset, test_images, test_labels = digits(options.seed)
    sampler = DistributedSampler(dataset, seed=options.seed) if distributed else None
    loader = DataLoader(dataset, batch_size=options.batch_size, sampler=sampler, shuffle=sampler is None)
    model = DistributedDataParallel(network()) if distributed else network()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)

    for epoch in range(options.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right = accuracy(model, test_images, test_labels)
        if not distributed or dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: test accuracy {right:.1%}")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
