"""Trains a deep net on handwritten digits, with weights, gradients and optimizer state in shards (FSDP2)."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import evenstep


class Block(torch.nn.Module):
    """What it computes is added to what it was given."""

    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.wide = torch.nn.Linear(width, 4 * width)
        self.narrow = torch.nn.Linear(4 * width, width)

    def forward(self, inputs):
        return inputs + self.narrow(functional.gelu(self.wide(self.norm(inputs))))


def digits():
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(data.target)
    return TensorDataset(images[360:], labels[360:]), images[:360], labels[:360]


@torch.no_grad()
def accuracy(model, images, labels):
    model.eval()
    right = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return right


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = [Block(options.width) for _ in range(options.blocks)]
    model = torch.nn.Sequential(torch.nn.Linear(64, options.width), *blocks, torch.nn.Linear(options.width, 10))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # After fully_shard: it is to have the shards.
    dataset, test_images, test_labels = digits()
    loader = DataLoader(dataset, batch_size=32, shuffle=True)
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader)

    for epoch in range(options.epochs):
        for images, labels in loader:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        right = accuracy(model, test_images, test_labels)  # On every worker: a forward pass needs them all.
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: test accuracy {right:.1%}, batch sizes {loader.batch_sizes}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
