"""Records how long real iterations take at many batch sizes: two workers, models of several shapes.

`traces/sizes/JOB-CONDITION.json` has, for each worker, the samples and the compute microseconds of every iteration.
Most iterations have equal sizes. In between stand sweeps, in which every size is kept for three iterations, so that a
replay can draw the time at any size: from the line through the sweeps, and the noise of an iteration. Conditions:

* `free`: the workers have the machine to themselves.
* `busy`: other programs run beside them. The script starts none: start some.
* `hog`: each worker is pinned to a core, and by turns another process takes half of worker 1's core.
"""

import argparse
import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from harness.competitors import competitor, pin
from harness.workers import run_workers
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.core.load import Load, LoadPolicy
from evenstep.core.values import Allocation
from evenstep.schemes import Scheme
from evenstep.telemetry import read_events

WORKERS, VICTIM, CLASSES = 2, 1, 10
SWEEP_EVERY, SWEEP_LENGTH, DWELL = 150, 36, 3
TURN_ITERATIONS = (30, 90)
FOLDER = Path(__file__).parent / "traces" / "sizes"


class Recurrent(nn.Module):
    """A GRU that reads a sequence and says its class."""

    def __init__(self, width):
        super().__init__()
        self.memory = nn.GRU(width // 4, width, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, inputs):
        return self.head(self.memory(inputs)[0][:, -1])


def dense(width, layers):
    parts = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, CLASSES)), (64,)


def convolutions(width, side, layers):
    parts = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    for _ in range(layers):
        parts += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)), (3, side, side)


def recurrent(width, context):
    return Recurrent(width), (context, width // 4)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained: the model, an equal share of the batch, and how many iterations are recorded."""

    make: object
    arguments: tuple[int, ...]
    size: int
    iterations: int


JOBS = {
    "1ms-a": Job(make=dense, arguments=(32, 1), size=8, iterations=750),
    "1ms-b": Job(make=dense, arguments=(128, 1), size=32, iterations=750),
    "3ms-a": Job(make=dense, arguments=(128, 10), size=32, iterations=750),
    "3ms-b": Job(make=convolutions, arguments=(8, 8, 2), size=8, iterations=750),
    "10ms-a": Job(make=recurrent, arguments=(64, 16), size=16, iterations=750),
    "10ms-b": Job(make=convolutions, arguments=(16, 12, 2), size=16, iterations=750),
    "50ms-a": Job(make=convolutions, arguments=(32, 16, 4), size=24, iterations=450),
    "50ms-b": Job(make=dense, arguments=(1024, 4), size=96, iterations=450),
    "300ms-a": Job(make=convolutions, arguments=(48, 24, 6), size=32, iterations=150),
    "300ms-b": Job(make=recurrent, arguments=(448, 80), size=16, iterations=150),
}


@dataclass(frozen=True, kw_only=True)
class Scheduled(Load):
    """Sizes by a schedule: equal, and in between sweeps: worker 0 has an eighth to seven eighths of the batch."""

    iterations: int = 0

    def policy(self, workers):
        return Schedule(self.iterations)


class Schedule(LoadPolicy):
    def __init__(self, iterations):
        draw, self._shares, self._now = random.Random(0), [], 0
        for iteration in range(iterations + 2):
            swept = iteration % SWEEP_EVERY >= SWEEP_EVERY - SWEEP_LENGTH
            if not swept:
                self._shares.append(0.5)
            elif iteration % DWELL == 0 or self._shares[-1] == 0.5:
                self._shares.append(draw.uniform(0.125, 0.875))
            else:
                self._shares.append(self._shares[-1])

    def observe(self, reports):
        self._now += 1

    def allocate(self, problem):
        first = min(max(round(self._shares[self._now] * problem.global_batch_size), 1), problem.global_batch_size - 1)
        return Allocation(sizes=np.array([first, problem.global_batch_size - first], dtype=np.int64))

    def state_dict(self):
        return {"now": self._now}

    def load_state_dict(self, state):
        self._now = state["now"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--conditions", nargs="+", choices=("free", "busy", "hog"), default=["free", "hog"])
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as run_dir:
        for condition in options.conditions:
            run_workers(WORKERS, _record, (options.jobs, condition, run_dir))
    return 0


def _record(rank, plan, tell):
    jobs, condition, run_dir = plan
    if condition == "hog":
        pin(rank)
    for name in jobs:
        with competitor("hog" if (rank, condition) == (VICTIM, "hog") else None, core=rank) as against:
            turns = _turns(JOBS[name].iterations) if condition == "hog" else {}
            trace = _train(rank, JOBS[name], turns, against, f"{run_dir}/{name}-{condition}")
        traces = [None] * WORKERS
        dist.all_gather_object(traces, trace)
        if rank == 0:
            written = {"job": name, "size": JOBS[name].size, "hog": sorted(turns), "workers": traces}
            text = json.dumps(written, separators=(",", ":"))
            (FOLDER / f"{name}-{condition}.json").write_text(text + "\n", encoding="utf-8")
            tell(f"{name}-{condition}: median {np.median(traces[0]['microseconds']) / 1000:.1f} ms")


def _turns(iterations):
    """The iterations at which the hog is turned on (the first, third ...) or off."""
    draw, turns, at = random.Random(1), {}, 0
    while (at := at + draw.randint(*TURN_ITERATIONS)) < iterations:
        turns[at] = len(turns) % 2 == 0
    return turns


def _train(rank, job, turns, against, run_dir):
    torch.manual_seed(0)
    model, shape = job.make(*job.arguments)
    length = 30 * WORKERS * job.size
    dataset = TensorDataset(torch.randn(length, *shape), torch.randint(CLASSES, (length,)))
    source = DataLoader(dataset, batch_size=job.size, shuffle=True, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheme = Scheme(name="scheduled", load=Scheduled(iterations=job.iterations))
    model, optimizer, loader = evenstep.prepare(model, optimizer, source, scheme=scheme, seed=0, run_dir=run_dir)
    done = 0
    while done < job.iterations:
        for inputs, targets in loader:
            if done in turns:
                against.turn(on=turns[done])
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if done == job.iterations:
                break
    dist.barrier()
    loader.close()
    mine = [each for each in read_events(Path(run_dir)) if each.kind == "iteration" and each.worker == rank]
    return {
        "samples": [each.samples for each in mine],
        "microseconds": [round(1e6 * each.compute_seconds) for each in mine],
    }


if __name__ == "__main__":
    sys.exit(main())
