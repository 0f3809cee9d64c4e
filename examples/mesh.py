"""Trains a perceptron on handwritten digits, each replica split over two processes (tensor parallelism under FSDP2)."""

import argparse
import itertools

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import evenstep


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=1536)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    widths, layers = [64, *[options.width] * 3, 10], []
    for inner, outer in itertools.pairwise(widths):
        layers += [torch.nn.Linear(inner, outer), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1])
    split = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(), "6": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], split)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images[360:], labels[360:]), batch_size=256, shuffle=True)
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, mesh=mesh, data_dims=("dp",))

    for epoch in range(options.epochs):
        for inputs, targets in loader:
            loss = functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():  # On every process: a forward pass needs all of them.
            right = (model(images[:360]).argmax(dim=1) == labels[:360]).float().mean().item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: test accuracy {right:.1%}, batch sizes {loader.batch_sizes}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
