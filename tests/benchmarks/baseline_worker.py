"""One worker of test_baseline: trains the same model several ways and writes the weights.

Its argument is a folder; it meets the other as the environment says.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from harness.baseline import PlainDDP, plain_loader
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import evenstep

SEED, LENGTH, BATCH = 3, 150, 12


def dataset():
    torch.manual_seed(SEED)
    return TensorDataset(torch.randn(LENGTH, 8), torch.randint(4, (LENGTH,)))


def network():
    torch.manual_seed(SEED)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def trained(model, loader, handed_out=lambda batch_size: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for inputs, targets in loader:
        handed_out(len(inputs))
        step(model, optimizer, inputs, targets)
    return weights(model)


def step(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()


def weights(model):
    return {name.removeprefix("module."): value.clone() for name, value in model.state_dict().items()}


def without_hook(rank, sizes):
    model = DistributedDataParallel(network())
    return trained(model, plain_loader(dataset(), sizes=sizes, worker=rank, seed=SEED))


def baseline(rank, sizes, weight=None):
    plain = PlainDDP(network(), weight=weight)
    return trained(plain.model, plain_loader(dataset(), sizes=sizes, worker=rank, seed=SEED), plain.handed_out)


def under_evenstep(**options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    source = DataLoader(dataset(), batch_size=BATCH // dist.get_world_size(), shuffle=True, drop_last=True)
    model, optimizer, loader = evenstep.prepare(model, optimizer, source, seed=SEED, **options)
    for inputs, targets in loader:
        step(model, optimizer, inputs, targets)
    return weights(model)


def main(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    equal, unequal = [BATCH // dist.get_world_size()] * dist.get_world_size(), [BATCH - 3, 3]
    results = {
        "without hook": without_hook(rank, equal),
        "baseline": baseline(rank, equal),
        "bsp": under_evenstep(scheme="bsp"),
        "baseline by hand": baseline(rank, unequal, unequal[rank] / BATCH),
        "static": under_evenstep(batch_sizes=unequal),
    }
    torch.save(results, folder / f"worker-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
