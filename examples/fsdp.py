"""Trains a transformer on handwritten digits, with weights, gradients and optimizer state in shards (FSDP2)."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import evenstep


class Reader(torch.nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.row = torch.nn.Linear(16, width)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        layers = [torch.nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(blocks)]
        self.blocks = torch.nn.Sequential(*layers)
        self.head = torch.nn.Linear(width, 10)

    def forward(self, rows):
        return self.head(self.blocks(self.row(rows)).mean(dim=1))


def digits():
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32) / 16
    rows = torch.cat([images, torch.eye(8).expand_as(images)], dim=2)  # The pixels and the index of each row.
    labels = torch.tensor(data.target)
    return TensorDataset(rows[360:], labels[360:]), rows[:360], labels[:360]


@torch.no_grad()
def accuracy(model, images, labels):
    model.eval()
    right = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return right


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=2)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Reader(options.width, options.blocks)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # After fully_shard, so that it gets the shards.
    dataset, test_images, test_labels = digits()
    loader = DataLoader(dataset, batch_size=128, shuffle=True)
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader)

    for epoch in range(options.epochs):
        for images, labels in loader:
            loss = functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        right = accuracy(model, test_images, test_labels)  # On every worker: a forward pass needs all of them.
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: test accuracy {right:.1%}, batch sizes {loader.batch_sizes}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
