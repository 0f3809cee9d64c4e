"""What streams cost beside a dataset that all workers have: the same samples, in one loop.

Three workers, the last one four times slower: the model sleeps for every sample that it computes on. A stream gives
each worker its own samples, without end. The rate is that of the optimizer's steps after the first ones. The variants
take turns.
"""

import itertools
import sys
import time
import warnings

import torch
import torch.distributed as dist
from harness import record
from harness.workers import run_workers
from integrations import BATCH, FEATURES, IDEAL, PER_SAMPLE, SLOWNESS, WORKERS, Model
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

STEPS, WARMUP, FILE = 60, 20, 256
SOURCES = ("map-style", "stream")


class Stream(IterableDataset):
    """Samples of this worker's own, one after the other."""

    def __init__(self, rank):
        generator = torch.Generator().manual_seed(rank)
        self._rows = [torch.randn(FILE, count, generator=generator) for count in (FEATURES, 1)]

    def __iter__(self):
        return itertools.cycle(zip(*self._rows, strict=True))


def main():
    parser = record.arguments(__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    steps = WARMUP + 4 if options.quick else STEPS
    repetitions = 1 if options.quick else options.repetitions
    rates = {source: [] for source in SOURCES}
    for repetition in range(repetitions):
        for source in SOURCES:
            rate = run_workers(WORKERS, _measure, (source, steps, options.seed), record.console.print)
            rates[source].append(rate)
            record.console.print(f"  {repetition + 1}/{repetitions} {source}: {rate:.0f} samples/s")
    ratios = [ours / theirs for ours, theirs in zip(rates["stream"], rates["map-style"], strict=True)]
    figures = [
        record.figure("stream, of the map-style dataset", ratios, goal=">= 0.95"),
        *(record.figure(f"{each}, of the ideal", [rate / IDEAL for rate in rates[each]]) for each in SOURCES),
    ]
    record.publish(
        "streams",
        f"{WORKERS} workers, speeds 1:1:1/4, each with a stream of its own",
        options,
        config={
            "workers": WORKERS,
            "batch_size": BATCH,
            "slowness": SLOWNESS,
            "seconds_per_sample": PER_SAMPLE,
            "steps": steps,
            "warmup": WARMUP,
            "repetitions": repetitions,
            "scheme": "lb-bsp",
        },
        figures=figures,
        raw=rates,
    )
    return 0


def _measure(rank, argument, tell):
    """Samples per second of all workers after the warm-up."""
    import evenstep

    source, steps, seed = argument
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    model, samples = Model(rank), WORKERS * BATCH * steps
    if source == "stream":
        dataset = Stream(rank)
    else:
        dataset = TensorDataset(torch.randn(samples, FEATURES), torch.randn(samples, 1))
    optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(dataset, batch_size=BATCH)
    stepped = []
    hook = register_optimizer_step_post_hook(lambda *_: stepped.append(time.perf_counter()))
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme="lb-bsp")
    for inputs, labels in loader:
        optimizer.zero_grad()
        model(inputs, labels)["loss"].backward()
        optimizer.step()
        if len(stepped) == steps:
            break
    hook.remove()
    loader.close()
    dist.barrier()
    measured = stepped[WARMUP:]
    return WORKERS * BATCH * (len(measured) - 1) / (measured[-1] - measured[0])


if __name__ == "__main__":
    sys.exit(main())
