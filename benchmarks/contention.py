"""Two workers that share their cores with others: no emulation, the competitors are real.

Each worker is pinned to a core of its own and trains a model whose iterations are nearly all compute. On the core of
worker 1 another process is there all the time, or comes and goes by turns that are drawn once for each repetition; or a
quota of half a core holds for worker 1. What the measured speeds allow is the ratio of the iteration times that they
would give with equal sizes and with sizes in proportion to speed, and communication that costs nothing.
"""

import json
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from harness import record
from harness.baseline import PlainDDP, plain_loader
from harness.competitors import PERIOD, QUOTA, competitor, pin, why_no_quota
from harness.workers import run_workers
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.core.errors import ConfigError
from evenstep.schemes import parse_scheme
from evenstep.telemetry import read_events
from evenstep.worker.factors import FactorSampler

WORKERS, VICTIM = 2, 1
BATCH, EPOCH_ITERATIONS, WARMUP = 480, 15, 10
STEPS, FEATURES, HIDDEN, CLASSES = 64, 32, 256, 10
TURN_ITERATIONS = (20, 60)
LONG = 60
"""Iterations of a segment from which on its first ones, with equal sizes, count for little."""
SCENARIOS = ("hog", "by-turns", "quota")
TRACES = Path(__file__).parent / "traces"
ALL = {
    "ddp": None,
    "bsp": "bsp",
    "lb-bsp": "lb-bsp",
    "lb-bsp, ema": "lb-bsp:predictor=ema",
    "lb-bsp, narx": "lb-bsp:predictor=narx",
}
"""What trains, by name: plain DDP, or a scheme."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What competes with worker 1."""

    name: str
    says: str
    kind: str
    iterations: int
    variants: tuple[str, ...]
    by_turns: bool = False

    def turns(self, seed):
        """The iterations at which it is turned on or off, with the part of the iteration: `forward` or `backward`."""
        if not self.by_turns:
            return {0: ("forward", True)}
        draw, at, on, turns = random.Random(seed), 0, False, {}
        at = draw.randint(WARMUP, TURN_ITERATIONS[0])
        while at < self.iterations:
            on = not on
            turns[at] = (draw.choice(("forward", "backward")), on)
            at += draw.randint(*TURN_ITERATIONS)
        return turns


@dataclass
class Trace:
    """What one worker saw of a segment; `factors` are those known before each iteration."""

    began: float = 0.0
    ended: list = field(default_factory=list)
    samples: list = field(default_factory=list)
    compute_seconds: list = field(default_factory=list)
    factors: list = field(default_factory=list)


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=30, help="of a segment under lasting competition")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    options = parser.parse_args()
    always, by_turns = (options.iterations, 105) if not options.quick else (15, 45)
    if options.quick:
        options.repetitions = 1
    variants = tuple(name for name, scheme in ALL.items() if scheme is None or _exists(scheme))
    fewer = tuple(name for name in variants if name != "bsp")
    scenarios = [
        Scenario(name="hog", says="another process on its core", kind="hog", iterations=always, variants=variants),
        Scenario(
            name="by-turns",
            says="another process on its core, by turns",
            kind="hog",
            iterations=by_turns,
            variants=fewer,
            by_turns=True,
        ),
        Scenario(name="quota", says="a quota of half a core", kind="quota", iterations=always, variants=fewer),
    ]
    skipped = why_no_quota()
    if skipped is not None:
        record.console.print(f"without the quota: {skipped}")
        scenarios.pop()
    scenarios = [scenario for scenario in scenarios if scenario.name in options.scenarios]
    with tempfile.TemporaryDirectory() as run_dir:
        plan = (scenarios, options.repetitions, options.seed, run_dir)
        raw = run_workers(WORKERS, _all_segments, plan, record.console.print)
    _write_traces(raw, scenarios, options)
    figures = [each for scenario in scenarios for each in _figures(raw[scenario.name], scenario, options.seed)]
    done = record.publish(
        "-".join(["contention", *(options.scenarios if options.scenarios != list(SCENARIOS) else [])]),
        "Two workers on a core each, worker 1 in competition: throughput against plain DDP's with equal sizes",
        options,
        config={
            "global_batch_size": BATCH,
            "epoch_iterations": EPOCH_ITERATIONS,
            "warmup": WARMUP,
            "model": {"steps": STEPS, "features": FEATURES, "hidden": HIDDEN, "classes": CLASSES},
            "variants": ALL,
            "iterations": {scenario.name: scenario.iterations for scenario in scenarios},
            "turns": {
                scenario.name: [scenario.turns(options.seed + r) for r in range(options.repetitions)]
                for scenario in scenarios
            },
            "quota": {"quota_microseconds": QUOTA, "period_microseconds": PERIOD, "skipped": skipped},
            "repetitions": options.repetitions,
        },
        figures=figures,
        raw=raw,
    )
    return 0 if done else 1


def _exists(scheme):
    try:
        parse_scheme(scheme)
    except ConfigError:
        return False
    return True


# What the workers do.


def _all_segments(rank, plan, tell):
    """`{scenario: {variant: [segment, ...]}}`, one segment for each repetition."""
    scenarios, repetitions, seed, run_dir = plan
    pin(rank)
    segments = {scenario.name: {name: [] for name in scenario.variants} for scenario in scenarios}
    for repetition in range(repetitions):
        for scenario in scenarios:
            with competitor(scenario.kind if rank == VICTIM else None, core=rank) as against:
                for name in reversed(scenario.variants) if repetition % 2 else scenario.variants:
                    folder = f"{run_dir}/{scenario.name}-{name}-{repetition}"
                    turned = _turner(against, scenario.turns(seed + repetition))
                    segment = _segment(rank, scenario.iterations, ALL[name], turned, seed, folder)
                    segments[scenario.name][name].append(segment)
                    pace = segment["settled_samples_per_second"]
                    tell(f"  {repetition + 1}/{repetitions} {scenario.name}, {name}: {pace:.0f} samples/s")
    return segments


def _turner(against, turns):
    """A function that, told the iteration and the part of it that begins, turns the competitor on or off."""
    against.turn(on=False)

    def turned(iteration, part):
        if turns.get(iteration, (None,))[0] == part:
            against.turn(on=turns[iteration][1])

    return turned


def _segment(rank, iterations, scheme, turned, seed, run_dir):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, CLASSES),
    )  # fmt: skip
    length = EPOCH_ITERATIONS * BATCH
    dataset = TensorDataset(torch.randn(length, STEPS, FEATURES), torch.randint(CLASSES, (length,)))
    if scheme is None:
        trace = _train_plain(rank, iterations, model, dataset, turned, seed)
    else:
        trace = _train_evenstep(rank, iterations, model, dataset, turned, seed, scheme, run_dir)
    traces = [None] * WORKERS
    dist.all_gather_object(traces, trace)
    return _merged(traces)


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


class ComputeClock:
    """Stands where the baseline holds a worker: notes when its compute ended, and samples the factors there."""

    def __init__(self, trace):
        self._trace = trace
        self._sampler = FactorSampler(threads=1, clock=time.perf_counter)
        self._factors = self._sampler.sample()

    def handed_out(self, batch_size):
        self._trace.samples.append(batch_size)
        self._trace.factors.append([self._factors.cpu_availability, self._factors.memory_availability])
        self._began = time.perf_counter()

    def until_due(self):
        self._trace.compute_seconds.append(time.perf_counter() - self._began)
        self._factors = self._sampler.sample()


def _train_plain(rank, iterations, model, dataset, turned, seed):
    loader = plain_loader(dataset, sizes=[BATCH // WORKERS] * WORKERS, worker=rank, seed=seed)
    group = dist.new_group(backend="gloo")
    trace = Trace()
    compute_clock = ComputeClock(trace)
    plain = PlainDDP(model, hold=compute_clock, process_group=group)
    optimizer = _sgd(model)
    dist.barrier()
    trace.began = time.perf_counter()
    for epoch in range(iterations // EPOCH_ITERATIONS):
        loader.batch_sampler.set_epoch(epoch)
        for inputs, targets in loader:
            plain.handed_out(len(inputs))
            _iterate(plain.model, optimizer, inputs, targets, turned, len(trace.ended))
            trace.ended.append(time.perf_counter())
    dist.barrier()
    dist.destroy_process_group(group)
    return trace


def _train_evenstep(rank, iterations, model, dataset, turned, seed, scheme, run_dir):
    source = DataLoader(dataset, batch_size=BATCH // WORKERS, shuffle=True, drop_last=True)
    model, optimizer, loader = evenstep.prepare(model, _sgd(model), source, scheme=scheme, seed=seed, run_dir=run_dir)
    trace = Trace()
    dist.barrier()
    trace.began = time.perf_counter()
    for epoch in range(iterations // EPOCH_ITERATIONS):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            _iterate(model, optimizer, inputs, targets, turned, len(trace.ended))
            trace.ended.append(time.perf_counter())
    dist.barrier()
    loader.close()
    for event in read_events(Path(run_dir)):
        if event.kind == "iteration" and event.worker == rank:
            trace.samples.append(event.samples)
            trace.compute_seconds.append(event.compute_seconds)
            if event.factors:
                trace.factors.append(event.factors[:2])
    return trace


def _iterate(model, optimizer, inputs, targets, turned, iteration):
    turned(iteration, "forward")
    loss = torch.nn.functional.cross_entropy(model(inputs).mean(dim=1), targets)
    optimizer.zero_grad()
    turned(iteration, "backward")
    loss.backward()
    optimizer.step()


def _merged(traces):
    """One segment from what all workers saw; their clocks are one machine's."""
    began = min(trace.began for trace in traces)
    ended = [max(ends) for ends in zip(*(trace.ended for trace in traces), strict=True)]
    settled = (len(ended) - WARMUP) * BATCH
    return {
        "iterations": len(ended),
        "seconds": ended[-1] - began,
        "settled_samples_per_second": settled / (ended[-1] - ended[WARMUP - 1]),
        "iteration_seconds": [round(end - start, 6) for start, end in zip([began, *ended], ended, strict=False)],
        "workers": [
            {
                "samples": trace.samples,
                "compute_seconds": [round(seconds, 6) for seconds in trace.compute_seconds],
                "cpu_availability": [round(factors[0], 4) for factors in trace.factors],
                "memory_availability": [round(factors[1], 4) for factors in trace.factors],
            }
            for trace in traces
        ],
    }


# What it amounts to.


def _figures(raw, scenario, seed):
    paces = {name: [segment["settled_samples_per_second"] for segment in raw[name]] for name in raw}
    allowed = [
        _allowed([raw[name][repetition] for name in raw], _states(scenario, seed + repetition))
        for repetition in range(len(paces["ddp"]))
    ]
    figures = [record.figure(f"{scenario.name}: gain that the speeds allow", allowed)]
    for name, pace in paces.items():
        if name == "ddp":
            continue
        gains = [fast / slow for fast, slow in zip(pace, paces["ddp"], strict=True)]
        long = scenario.name == "hog" and name == "lb-bsp" and scenario.iterations >= LONG
        goal = ">= 1.45" if long else None
        figures.append(record.figure(f"{scenario.name}: {name}, times plain DDP", gains, goal=goal))
        if name != "bsp":
            parts = [gain / most for gain, most in zip(gains, allowed, strict=True)]
            goal = ">= 0.93" if name == "lb-bsp" else None
            figures.append(record.figure(f"{scenario.name}: {name}, of the gain allowed", parts, goal=goal))
    return figures


def _states(scenario, seed):
    """Whether the competitor is on, iteration by iteration; in one in which it is turned, its new state."""
    turns, on, states = scenario.turns(seed), False, []
    for iteration in range(scenario.iterations):
        on = turns[iteration][1] if iteration in turns else on
        states.append(on)
    return states


def _allowed(segments, states):
    """The gain for workers of the speeds that these segments, all of one repetition, had in each of the two states."""
    speeds = {}
    for state in set(states[WARMUP:]):
        counted = [k for k in range(WARMUP, len(states)) if states[k] == state]
        speeds[state] = [
            sum(segment["workers"][worker]["samples"][k] for segment in segments for k in counted)
            / sum(segment["workers"][worker]["compute_seconds"][k] for segment in segments for k in counted)
            for worker in range(WORKERS)
        ]
    equal = sum(BATCH / WORKERS / min(speeds[state]) for state in states[WARMUP:])
    balanced = sum(BATCH / sum(speeds[state]) for state in states[WARMUP:])
    return equal / balanced


def _write_traces(raw, scenarios, options):
    """One file for each segment whose factors are known before every iteration."""
    folder = TRACES / "quick" if options.quick else TRACES
    folder.mkdir(parents=True, exist_ok=True)
    for scenario in scenarios:
        for name in scenario.variants:
            for repetition, segment in enumerate(raw[scenario.name][name]):
                if any(len(each["cpu_availability"]) != segment["iterations"] for each in segment["workers"]):
                    continue
                turns = scenario.turns(options.seed + repetition)
                description = f"{scenario.says} of worker {VICTIM}; {name}; turned at {turns}"
                spelled = name.replace(", ", "-")
                path = folder / f"contention-{scenario.name}-{spelled}-{repetition}.json"
                text = json.dumps({"description": description, "workers": segment["workers"]})
                path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
