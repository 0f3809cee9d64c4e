"""A script for `evenstep run`: worker 0's share of the device's memory is a fourth of worker 1's.

It prints, as JSON, the largest batch that worker 0's share holds and the largest that it was given.
"""

import json
import sys

import torch
import torch.distributed as dist

import evenstep
from harness import gpu_tasks

WIDTH, FRACTIONS, EPOCHS = 8192, (0.02, 0.08), 12


def main():
    dist.init_process_group("gloo")  # NCCL refuses two ranks on one device.
    rank, device = dist.get_rank(), torch.device("cuda")
    torch.cuda.set_per_process_memory_fraction(FRACTIONS[rank], device)
    holds = [_largest(device)]
    dist.broadcast_object_list(holds)
    batch = int(sys.argv[1]) if len(sys.argv) > 1 else round(holds[0] * 1.25)
    model = gpu_tasks.Net(WIDTH, torch.float32).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    dataset = gpu_tasks.rows(20 * batch, torch.float32)
    model, optimizer, loader = evenstep.prepare(
        model, optimizer, gpu_tasks.loader_of(dataset, batch), process_group=dist.group.WORLD
    )
    largest = 0
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            largest = max(largest, len(inputs))
            loss = gpu_tasks.loss_of(model(inputs.to(device)), targets.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if rank == 0:
        print(json.dumps({"holds": holds[0], "largest_run": largest, "equal": batch}))
    dist.destroy_process_group()


def _largest(device):
    """The largest batch, to a sixteenth, whose forward and backward fit beside the model and its gradients."""
    model, fits, step = gpu_tasks.Net(WIDTH, torch.float32).to(device), 0, 2**20
    while step > max(fits // 16, 1) or not fits:
        if _holds(model, fits + step, device):
            fits += step
        else:
            step //= 2
    return fits


def _holds(model, samples, device):
    try:
        inputs, targets = (each.to(device) for each in gpu_tasks.rows(samples, torch.float32).tensors)
        gpu_tasks.loss_of(model(inputs), targets).backward()
    except torch.OutOfMemoryError:
        return False
    finally:
        inputs = targets = None
        torch.cuda.empty_cache()
    return True


if __name__ == "__main__":
    main()
