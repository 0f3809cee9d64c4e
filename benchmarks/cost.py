"""Samples that cost differently: sharing out by predicted seconds, by count, in groups of like length, by equal cost.

Real DistributedDataParallel over Gloo, 64 texts an iteration whose lengths are log-normal (sigma 1, as of text corpora;
at most 16 times the median). Each worker sleeps before its backward for as long as its device would take for its
tokens, whichever contestant it runs, so seconds follow cost on all of them alike. The contestants:

* `ddp`: as many texts for each worker, in random order
* `ddp, grouped`: the same, in groups of like length (sorted in megabatches of 50 iterations, as `group_by_length` does)
* `ddp, equal cost`: unequal counts so that the cost of each worker is equal (the rule of the Transformers library's
  rebalancing sampler, reimplemented; its gradients are not weighed here, which takes no time)
* `lb-bsp`: sizes follow speed, without `cost=`
* `lb-bsp, cost`: with `cost=`

Each figure is the part of the ideal, tokens per second over the sum of the devices' speeds.
"""

import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from harness import record
from harness.workers import run_workers
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.core.samples import balanced
from evenstep.core.values import UNLIMITED

CLUSTERS = {"equal": (1, 1, 1, 1), "1:1:2:4": (1, 1, 2, 4)}
CONTESTANTS = ("ddp", "ddp, grouped", "ddp, equal cost", "lb-bsp", "lb-bsp, cost")
EACH, IDEAL_SECONDS, WARMUP, MEGABATCH = 16, 0.4, 12, 50
FEATURES = 16


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=16, help="measured, after the warm-up")
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.iterations = 1, 4
    plan = options.seed, options.repetitions, options.iterations
    raw = run_workers(4, _measure, plan, show=record.console.print)
    done = record.publish(
        "cost",
        f"Part of the ideal with texts of unequal length, 4 workers, {IDEAL_SECONDS:g} s an iteration at best",
        options,
        config={
            "clusters": CLUSTERS,
            "global_batch_size": 4 * EACH,
            "ideal_seconds": IDEAL_SECONDS,
            "warmup": WARMUP,
            "iterations": options.iterations,
            "repetitions": options.repetitions,
        },
        figures=_figures(raw),
        raw=raw,
    )
    return 0 if done else 1


def _figures(raw):
    figures = []
    for cluster, parts in raw.items():
        figures += [record.figure(f"{cluster}: {name}, of the ideal", parts[name], goal=_goal(cluster, name))
                    for name in CONTESTANTS]  # fmt: skip
        for other, goal in _OVER[cluster].items():
            ratios = [ours / theirs for ours, theirs in zip(parts["lb-bsp, cost"], parts[other], strict=True)]
            figures.append(record.figure(f"{cluster}: lb-bsp, cost, times {other}", ratios, goal=goal))
    for samples, workers, most in ((10_000, 64, 5.0), (4 * EACH, 4, 1000 * IDEAL_SECONDS / 100)):
        figures.append(
            record.figure(
                f"sharing {samples} samples out to {workers}",
                _planning(samples, workers),
                goal=f"<= {most:g}",
                unit="ms",
            )
        )
    return figures


_OVER = {
    "equal": {"ddp": ">= 1.4", "ddp, equal cost": ">= 1.0", "ddp, grouped": None},
    "1:1:2:4": {"ddp": None, "ddp, equal cost": None, "ddp, grouped": None, "lb-bsp": ">= 1.25"},
}


def _goal(cluster, name):
    return ">= 0.93" if (cluster, name) == ("1:1:2:4", "lb-bsp, cost") else None


def _planning(samples, workers):
    """Milliseconds of a few calls."""
    generator = np.random.default_rng(0)
    speeds, nothing = generator.integers(500, 2000, workers), np.zeros(workers, dtype=np.int64)
    found = []
    for _ in range(9):
        costs = (_lengths(generator, samples) * 2**20).astype(np.int64)
        began = time.perf_counter()
        balanced(costs, speeds, lower=nothing, upper=np.full(workers, UNLIMITED))
        found.append(1000 * (time.perf_counter() - began))
    return found


def _lengths(generator, count):
    """Tokens, of median 1."""
    return np.minimum(generator.lognormal(0, 1, count), 16.0)


# On each worker.


def _measure(rank, plan, tell):
    seed, repetitions, iterations = plan
    found = {cluster: {name: [] for name in CONTESTANTS} for cluster in CLUSTERS}
    for repetition in range(repetitions):
        lengths = _lengths(np.random.default_rng([seed, repetition]), 4 * EACH * (WARMUP + iterations))
        for cluster, speeds in CLUSTERS.items():
            # So that an iteration of mean length takes the ideal time where nobody waits.
            scale = 4 * EACH * lengths.mean() / sum(speeds) / IDEAL_SECONDS
            for name in CONTESTANTS:
                part = _run(name, rank, lengths, speeds[rank] * scale, sum(speeds) * scale, seed)
                found[cluster][name].append(part)
                tell(f"{repetition + 1}/{repetitions} {cluster}, {name}: {part:.3f} of the ideal")
    return found


def _run(name, rank, lengths, speed, speeds, seed):
    """The part of the ideal over the measured iterations."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tokens = torch.from_numpy(lengths)
    dataset = TensorDataset(torch.randn(len(lengths), FEATURES), tokens)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
    closing = None
    if name.startswith("lb-bsp"):
        loader = DataLoader(dataset, batch_size=EACH, shuffle=True)
        cost = {"cost": lengths} if name.endswith("cost") else {}
        model, optimizer, batches = evenstep.prepare(model, optimizer, loader, scheme="lb-bsp", seed=seed, **cost)
        closing = batches
    else:
        model = DistributedDataParallel(model)
        batches = ([tensor[own] for tensor in dataset.tensors] for own in _parts(name, rank, order, tokens))
    done = torch.zeros(1, dtype=torch.float64)
    for number, (inputs, own) in enumerate(batches):
        if number == WARMUP:
            dist.barrier()
            began = time.perf_counter()
        loss = model(inputs).square().mean()
        real = closing is None or closing.current.samples > 0
        time.sleep(float(own.sum()) / speed)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        done += float(own.sum()) if number >= WARMUP and real else 0.0
    dist.barrier()
    seconds = time.perf_counter() - began
    dist.all_reduce(done)
    if closing is not None:
        closing.close()
    return float(done) / seconds / speeds


def _parts(name, rank, order, tokens):
    """The samples of this worker in each iteration, as a plain script would choose them."""
    if name == "ddp, grouped":
        order = _grouped(order, tokens)
    for union in order.split(4 * EACH):
        if name == "ddp, equal cost":
            costs, counts = (tokens[union].numpy() * 2**20).astype(np.int64), np.full(4, UNLIMITED)
            owners = balanced(costs, np.ones(4, dtype=np.int64), lower=np.ones(4, dtype=np.int64), upper=counts)
            yield union[torch.from_numpy(owners == rank)]
        else:
            yield union[rank::4]


def _grouped(order, tokens):
    """Sorted by length in megabatches, whose iterations then come in random order."""
    generator = torch.Generator().manual_seed(1)
    pieces = [
        piece
        for mega in order.split(MEGABATCH * 4 * EACH)
        for piece in mega[torch.argsort(tokens[mega], descending=True)].split(4 * EACH)
    ]
    return torch.cat([pieces[each] for each in torch.randperm(len(pieces), generator=generator).tolist()])


if __name__ == "__main__":
    sys.exit(main())
