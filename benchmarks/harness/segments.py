"""Timed segments of training on emulated devices: variants interleaved in the same processes.

Every segment begins with a fresh model, optimizer and loader from the same seed. Its time runs from a barrier to the
end of the last optimizer step on the last worker.
"""

import gc
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.cluster import Cluster
from evenstep.schemes import Scheme
from evenstep.telemetry import read_events
from harness.baseline import DeviceHold, PlainDDP, plain_loader
from harness.workers import run_workers

FEATURES, CLASSES = 64, 10


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train: under evenstep with `scheme`, or with plain DDP and `sizes` set by hand (None: equal)."""

    name: str
    iterations: int
    scheme: str | Scheme | None = None
    sizes: tuple[int, ...] | None = None
    warmup: int = 5
    """Iterations at the start of a segment that its settled time leaves out."""
    epoch_iterations: int | None = None
    """Iterations of an epoch; None: the segment is one epoch."""
    cluster: Cluster | None = None
    """What this variant trains on, where it is not the plan's cluster."""
    only: tuple[int, ...] | None = None
    """The repetitions that have this variant; None: all."""

    def __post_init__(self):
        if self.iterations % (self.epoch_iterations or self.iterations):
            raise ValueError(f"{self.iterations} iterations are no whole number of epochs of {self.epoch_iterations}")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All segments of a run."""

    cluster: Cluster
    global_batch_size: int
    variants: tuple[Variant, ...]
    repetitions: int
    seed: int = 0
    num_workers: int = 0
    alternate: bool = False
    """Every other repetition takes the variants in the opposite order."""
    run_dir: str | None = None


@dataclass
class Trace:
    """What one worker saw of a segment."""

    began: float = 0.0
    ended: list[float] = field(default_factory=list)
    overruns: list[int] = field(default_factory=list)
    sizes: list[list[int]] = field(default_factory=list)


def run(plan, show=print):
    """All segments, as `{variant: [segment, ...]}`, one segment for each repetition."""
    return run_workers(len(plan.cluster), _all_segments, plan, show)


def _all_segments(rank, plan, tell):
    segments = defaultdict(list)
    for repetition in range(plan.repetitions):
        backwards = plan.alternate and repetition % 2
        for variant in reversed(plan.variants) if backwards else plan.variants:
            if variant.only is not None and repetition not in variant.only:
                continue
            segment = _segment(rank, plan, variant, repetition)
            segments[variant.name].append(segment)
            tell(
                f"  {repetition + 1}/{plan.repetitions} {variant.name}: {segment['iterations']} iterations in"
                f" {segment['seconds']:.2f} s, overrun in {segment['overrun_iterations']}, {segment['sizes'][-1][1]}"
            )
    return dict(segments)


def _segment(rank, plan, variant, repetition):
    torch.manual_seed(plan.seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 256), torch.nn.ReLU(), torch.nn.Linear(256, 128), torch.nn.ReLU(),
        torch.nn.Linear(128, CLASSES),
    )  # fmt: skip
    length = (variant.epoch_iterations or variant.iterations) * plan.global_batch_size
    dataset = TensorDataset(torch.randn(length, FEATURES), torch.randint(CLASSES, (length,)))
    train = _train_plain if variant.scheme is None else _train_evenstep
    run_dir = None if plan.run_dir is None else f"{plan.run_dir}/{variant.name}-{repetition}"
    trace = train(rank, plan, variant, model, dataset, run_dir)
    traces = [None] * len(plan.cluster)
    dist.all_gather_object(traces, trace)
    segment = _merged(traces, plan, variant)
    segment["plans"] = _plan_events(run_dir) if run_dir and rank == 0 else None
    gc.collect()
    return segment


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def _train_plain(rank, plan, variant, model, dataset, run_dir):
    workers, total = len(plan.cluster), plan.global_batch_size
    sizes = variant.sizes or tuple(total // workers + (worker < total % workers) for worker in range(workers))
    loader = plain_loader(dataset, sizes=sizes, worker=rank, seed=plan.seed, num_workers=plan.num_workers)
    # A group of its own, as evenstep has.
    group = dist.new_group(backend="gloo")
    hold = DeviceHold(disturbance=(variant.cluster or plan.cluster).disturbance(), worker=rank)
    weight = None if variant.sizes is None else sizes[rank] / total
    plain = PlainDDP(model, hold=hold, weight=weight, process_group=group)
    optimizer, trace = _sgd(model), _begin()
    for epoch in range(_epochs(variant)):
        loader.batch_sampler.set_epoch(epoch)
        for inputs, targets in loader:
            plain.handed_out(len(inputs))
            _iterate(plain.model, optimizer, inputs, targets)
            trace.ended.append(time.perf_counter())
            trace.overruns.append(hold.overruns)
            trace.sizes.append(list(sizes))
    dist.barrier()
    dist.destroy_process_group(group)
    return trace


def _train_evenstep(rank, plan, variant, model, dataset, run_dir):
    source = DataLoader(dataset, batch_size=1, shuffle=True, drop_last=True, num_workers=plan.num_workers)
    model, optimizer, loader = evenstep.prepare(
        model,
        _sgd(model),
        source,
        scheme=variant.scheme,
        global_batch_size=plan.global_batch_size,
        seed=plan.seed,
        emulate=variant.cluster or plan.cluster,
        run_dir=run_dir,
    )
    trace = _begin()
    for _ in range(_epochs(variant)):
        for inputs, targets in loader:
            _iterate(model, optimizer, inputs, targets)
            trace.ended.append(time.perf_counter())
            trace.overruns.append(loader.statistics().overruns)
            trace.sizes.append(loader.current.sizes.tolist())
    dist.barrier()
    # A script prepares once and ends; here the threads of one segment must not run on in the next.
    loader.close()
    return trace


def _epochs(variant):
    return variant.iterations // (variant.epoch_iterations or variant.iterations)


def _begin():
    dist.barrier()
    return Trace(began=time.perf_counter())


def _iterate(model, optimizer, inputs, targets):
    loss = torch.nn.functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _merged(traces, plan, variant):
    """One segment from what all workers saw; their clocks are one machine's."""
    began = min(trace.began for trace in traces)
    ended = [max(ends) for ends in zip(*(trace.ended for trace in traces), strict=True)]
    overran = [
        any(now > before for now, before in zip(after, earlier, strict=True))
        for after, earlier in zip(
            zip(*(trace.overruns for trace in traces), strict=True),
            zip(*([0, *trace.overruns[:-1]] for trace in traces), strict=True),
            strict=True,
        )
    ]
    sizes = traces[0].sizes
    settled = len(ended) - variant.warmup
    return {
        "iterations": len(ended),
        "seconds": ended[-1] - began,
        "samples_per_second": len(ended) * plan.global_batch_size / (ended[-1] - began),
        "settled_iteration_seconds": (ended[-1] - ended[variant.warmup - 1]) / settled,
        "settled_samples_per_second": settled * plan.global_batch_size / (ended[-1] - ended[variant.warmup - 1]),
        "iteration_seconds": [round(end - start, 6) for start, end in zip([began, *ended], ended, strict=False)],
        "sizes": [[k, s] for k, s in enumerate(sizes) if k == 0 or s != sizes[k - 1]],
        "overrun_iterations": sum(overran),
        "overruns_by_worker": [trace.overruns[-1] for trace in traces],
    }


def sizes_of(segment):
    """The sizes of every iteration of a segment."""
    changes, sizes, now = dict(segment["sizes"]), [], None
    for iteration in range(segment["iterations"]):
        now = changes.get(iteration, now)
        sizes.append(now)
    return sizes


def _plan_events(run_dir):
    """Worker 0's, `[iteration, sizes]`; all workers decide alike."""
    return [
        [event.iteration, event.batch_sizes]
        for event in read_events(Path(run_dir))
        if event.kind == "plan" and event.worker == 0
    ]
