"""Two workers on a core each, real compute: several ways to train the same model by turns, in blocks of iterations."""

import gc
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import evenstep
import evenstep.torch
from harness import parts
from harness.competitors import pin

WORKERS = 2
PLAIN = ("ddp", "ddp-views", "ddp-hook")
"""Plain DDP; the same with `gradient_as_bucket_view`; that with a Python hook that only sums."""
OURS = ("bsp", "lb-bsp")
WARMUP = 12
_FEATURES, _CLASSES, _BLOCKS = 64, 10, 24
_EPOCH_ITERATIONS = 256


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of so many million parameters, in `few` tensors or in many, and the samples of a worker's batch."""

    millions: float
    few: bool
    batch: int

    @property
    def name(self):
        return f"{self.millions:g} M in {'few' if self.few else 'many'} tensors, batch {self.batch}"

    def model(self):
        """Two hidden layers, or 24 with a norm each, as wide as it takes."""
        torch.manual_seed(0)
        hidden = 2 if self.few else _BLOCKS
        # (hidden - 1) width^2 + what is linear in the width.
        linear = _FEATURES + _CLASSES + hidden * (1 if self.few else 3)
        width = round((-linear + (linear**2 + 4e6 * (hidden - 1) * self.millions) ** 0.5) / (2 * (hidden - 1)))
        layers = []
        for number in range(hidden):
            layers += [torch.nn.Linear(width if number else _FEATURES, width)]
            layers += [torch.nn.ReLU()] if self.few else [torch.nn.LayerNorm(width), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers, torch.nn.Linear(width, _CLASSES))


def training(variant, case, rank, *, stored=False, run_dir=None):
    """An endless iterator that trains one iteration at a time; with `stored`, plain DDP's batches are made before."""
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    evenstep.torch.leave_alone(optimizer)  # Loops of other variants are under way in this process.
    samples = case.batch * WORKERS * _EPOCH_ITERATIONS
    dataset = TensorDataset(torch.randn(samples, _FEATURES), torch.randint(_CLASSES, (samples,)))
    if variant in PLAIN:
        sampler = DistributedSampler(dataset, WORKERS, rank, shuffle=True)
        loader = DataLoader(dataset, batch_size=case.batch, sampler=sampler)
        model = DistributedDataParallel(
            model, process_group=dist.new_group(backend="gloo"), gradient_as_bucket_view=variant != "ddp"
        )
        if variant == "ddp-hook":
            _register_bare_hook(model)
        if stored:
            loader = [next(iter(loader))]
    else:
        source = DataLoader(dataset, batch_size=case.batch, shuffle=True)
        model = DistributedDataParallel(
            model, process_group=dist.new_group(backend="gloo"), gradient_as_bucket_view=True
        )
        model, optimizer, loader = evenstep.prepare(model, optimizer, source, scheme=variant, run_dir=run_dir)
    while True:
        for inputs, targets in loader:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loader


def _register_bare_hook(model):
    group = model.process_group

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer().mul_(1 / WORKERS)
        return dist.all_reduce(buffer, group=group, async_op=True).get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, hook)


def by_turns(rank, plan, tell):
    """For each variant, blocks of `[wall seconds, CPU seconds]` an iteration: wall of the slower worker, CPU of both.

    `plan` holds the case, the variants, the number of rounds, the seconds of a block and a run directory or None. Every
    round runs a block of each variant; every other round in the opposite order.
    """
    case, variants, rounds, block_seconds, run_dir = plan
    pin(rank)
    runs = {name: training(name.removesuffix("+log"), case, rank, run_dir=_log_of(name, run_dir)) for name in variants}
    for name in variants:
        for _ in range(WARMUP):
            next(runs[name])
    began = time.perf_counter()
    for name in variants:
        next(runs[name])
    length = torch.tensor([(time.perf_counter() - began) / len(variants)])
    dist.all_reduce(length, op=dist.ReduceOp.MAX)
    iterations = max(1, round(block_seconds / float(length)))
    gc.collect()
    gc.freeze()  # The objects of all variants are more than a script has, and would be looked through again and again.
    blocks = {name: [] for name in variants}
    for number in range(rounds):
        for name in reversed(variants) if number % 2 else variants:
            blocks[name].append(_block(runs[name], iterations))
    tell(f"  {case.name}: {rounds} rounds of {iterations} iterations")
    ours = [name for name in variants if name not in PLAIN]
    return {
        "iterations_in_block": iterations,
        "blocks": _merged(blocks),
        "sizes": {name: next(runs[name]).current.sizes.tolist() for name in ours},
        "parts": {name: _parts(runs[name], 2 * iterations) for name in ours},
    }


def _parts(run, iterations):
    """The seconds that an iteration spends in each part of evenstep."""
    with parts.timed() as timers:
        for _ in range(iterations):
            next(run)
    return {part: seconds / iterations for part, seconds in timers.seconds.items()}


def _log_of(name, run_dir):
    return f"{run_dir}/{name}" if name.endswith("+log") else None


def _block(run, iterations):
    next(run)  # It brings this variant's weights back into the caches.
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(iterations):
        next(run)
    return (time.perf_counter() - wall) / iterations, (time.process_time() - cpu) / iterations


def _merged(blocks):
    all_blocks = [None] * WORKERS
    dist.all_gather_object(all_blocks, blocks)
    return {
        name: [
            [max(wall for wall, _ in pair), sum(cpu for _, cpu in pair) / WORKERS]
            for pair in zip(*(each[name] for each in all_blocks), strict=True)
        ]
        for name in blocks
    }


def calls(rank, plan, tell):
    """Calls per iteration in the main thread of worker 0, by variant: of Python functions, and of C functions too.

    They do not depend on the machine's load. Plain DDP's batches are made before, so that what is counted beyond it
    contains the loader. The fewest over iterations are of one that changes no sizes, of which there are few where noise
    is; and none looks at how the loss is scaled, as the first ones with unlike sizes do.
    """
    case, variants, iterations = plan
    counts = {}
    for name in variants:
        run = training(name, case, rank, stored=True)
        for _ in range(WARMUP):
            loader = next(run)
        if name not in PLAIN:
            loader.engine._scale = None
        counts[name] = min(_calls(run) for _ in range(iterations))
        if name not in PLAIN:
            loader.close()  # Its hook on all optimizers would count in the next variant.
    return counts


def _calls(run):
    python = every = 0

    def profile(frame, event, argument):
        nonlocal python, every
        python += event == "call"
        every += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        next(run)
    finally:
        sys.setprofile(None)
    return python, every
