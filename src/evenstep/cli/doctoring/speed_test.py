"""The script that `evenstep doctor` runs: trains a small model for a while, and gathers what every worker saw.

evenstep run --workers 4 --run-dir runs/test speed_test.py --seconds 10 --into answer
"""

import argparse
import hmac
import os
import platform
import socket
import time
from pathlib import Path
from typing import Final

import msgspec
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import evenstep
from evenstep.advice.hosts import HostFacts
from evenstep.cli.env import facts
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.server_settings import SECRET_VARIABLE
from evenstep.torch.processes.workers import Workers, gather

FEATURES: Final = 256
CLASSES: Final = 10
WIDTHS: Final = {"cpu": 512, "cuda": 4096}
"""Of the hidden layers, so that a batch takes a while on the fastest device."""
ENOUGH_SECONDS: Final = 0.02
"""An iteration of plain work should take this long on every worker, beside which communication is small."""
LARGEST: Final = {"cpu": 1024, "cuda": 8192}
EMULATED: Final = 32
"""Samples per worker on emulated devices, whose time real work must not exceed."""
MIN_ITERATIONS: Final = 50
LOOK: Final = 10
"""Iterations between two looks at the clock, by all workers together."""


def network(width: int) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


def iterate(model: nn.Module, samples: int, device: torch.device) -> None:
    """Forward and backward on as many random rows."""
    inputs = torch.randn(samples, FEATURES, device=device)
    loss = cross_entropy(model(inputs), torch.randint(CLASSES, (samples,), device=device))
    torch.autograd.backward(loss)


def enough_samples(model: nn.Module, device: torch.device) -> int:
    """The smallest power of two whose iteration takes long enough here."""
    samples = 16
    while samples < LARGEST[device.type]:
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            iterate(model, samples, device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
        if min(seconds) >= ENOUGH_SECONDS:
            break
        samples *= 2
    model.zero_grad()
    return samples


def largest(value: float) -> float:
    """The largest of all workers' values."""
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def train(options: argparse.Namespace, device: torch.device, emulated: bool) -> None:
    """Train until the time is over on some worker; at least 50 iterations."""
    torch.manual_seed(0)
    model = network(int(largest(WIDTHS[device.type]))).to(device)
    own = options.batch_size or (EMULATED if emulated else enough_samples(model, device))
    samples = int(largest(own))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = evenstep.Session("lb-bsp")
    model, optimizer = session.model(model), session.optimizer(optimizer)
    began = time.perf_counter()
    for iteration, share in enumerate(session.shares(None, samples * dist.get_world_size()), start=1):
        iterate(model, len(share.positions), device)
        optimizer.step()
        optimizer.zero_grad()
        looks = iteration >= MIN_ITERATIONS and iteration % LOOK == 0
        if looks and largest(time.perf_counter() - began) >= options.seconds:
            break
    session.close()


def host_facts(device: torch.device, salt: str) -> HostFacts:
    """What this worker knows of its host; the first on each host knows all of it."""
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    secret = os.environ.get(SECRET_VARIABLE)
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return HostFacts(
        name=platform.node(),
        node=int(os.environ.get("GROUP_RANK", "0")),
        workers=[dist.get_rank()],
        devices=[named],
        processors=len(psutil.Process().cpu_affinity() or ()) or os.cpu_count() or 1,
        interfaces=[
            f"{name} {each.address}"
            for name, addresses in sorted(psutil.net_if_addrs().items())
            for each in addresses
            if name in up and each.family == socket.AF_INET
        ],
        secret=None if secret is None else hmac.new(secret.encode(), salt.encode(), "sha256").hexdigest(),
        found={name: _text(value) for name, value in facts().items()} if first else {},
    )


def _text(value: object) -> str | list[str]:
    return [str(each) for each in value] if isinstance(value, list) else str(value)


def main() -> None:
    """Train, then write the events of all workers and the facts of all hosts to a folder of worker 0's host."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--into", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    settings = LaunchSettings.from_environment(os.environ)
    assert settings.run_dir is not None
    train(options, device, settings.emulate is not None)
    workers = Workers(
        rank=dist.get_rank(),
        count=dist.get_world_size(),
        host=platform.node(),
        timeout_seconds=options.seconds,
        host_group=dist.group.WORLD,
    )
    salt = gather(workers, {"salt": os.urandom(16).hex()})[0]["salt"]
    log = Path(settings.run_dir, f"worker-{workers.rank}.jsonl").read_text(encoding="utf-8")
    # Each host has its own run directory, and advice needs the events of all workers.
    everything = gather(workers, {"log": log, "facts": msgspec.to_builtins(host_facts(device, salt))})
    if workers.rank == 0:
        for rank, told in enumerate(everything):
            (options.into / f"worker-{rank}.jsonl").write_text(told["log"], encoding="utf-8")
            (options.into / f"facts-{rank}.json").write_bytes(msgspec.json.encode(told["facts"]))
    # Without the interpreter's end: a thread of Gloo may only then drop its last collective, and aborts without the
    # GIL that it needs for this (seen with torch 2.13; destroy_process_group leaves the group of a DDP model alive).
    os._exit(0)


if __name__ == "__main__":
    main()
