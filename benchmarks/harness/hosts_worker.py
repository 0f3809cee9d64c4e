"""One worker of `server_hosts.py`: exchanges what belongs to a model that takes no time to compute."""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import evenstep

PARAMETERS = 16
WARMUP = 2
"""Iterations."""
_LENGTH = 10**6


class Weights(torch.nn.Module):
    """Parameters of so many bytes together, all of the same size, whose gradients are dense."""

    def __init__(self, model_bytes):
        super().__init__()
        size = model_bytes // 4 // PARAMETERS
        self.parts = torch.nn.ParameterList(torch.zeros(size) for _ in range(PARAMETERS))

    def forward(self, inputs):
        return inputs.mean() * sum(part.sum() for part in self.parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scheme")
    parser.add_argument("--bytes", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = Weights(options.bytes)
    data = DataLoader(TensorDataset(torch.ones(1, 1).expand(_LENGTH, 1)), batch_size=1)
    model, optimizer, loader = evenstep.prepare(
        model, torch.optim.SGD(model.parameters(), lr=1e-9), data, scheme=options.scheme, timeout=300.0
    )
    rank, stop = int(os.environ["RANK"]), options.out / "stop"
    served = options.scheme.partition(":")[0] not in ("bsp", "diloco")
    steps, began, sent = [], None, 0
    for number, (inputs,) in enumerate(loader, 1):
        loss = model(inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps.append(time.monotonic())
        if number == WARMUP:
            (options.out / f"warm-{rank}").touch()
        if rank == 0 and not stop.exists():
            if began is None and len(list(options.out.glob("warm-*"))) == int(os.environ["WORLD_SIZE"]):
                began, sent = steps[-1], _sent_bytes()
            elif began is not None and steps[-1] - began >= options.seconds:
                # All count in the same time, in which all exchange. Without servers all must leave at one iteration.
                seen = {"at": number + 2, "window": [began, steps[-1]], "sent": _sent_bytes() - sent}
                (options.out / "stopping").write_text(json.dumps(seen))
                (options.out / "stopping").rename(stop)
        if stop.exists() and (served or number == json.loads(stop.read_text())["at"]):
            break
    (options.out / f"{rank}.json").write_text(json.dumps(steps))
    loader.close()


def _sent_bytes():
    """What this host has sent over the cable."""
    path = Path("/sys/class/net", os.environ["GLOO_SOCKET_IFNAME"], "statistics/tx_bytes")
    return int(path.read_text())


if __name__ == "__main__":
    main()
