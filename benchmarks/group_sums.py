"""What an exchange of a group on one host costs by who sums its gradients up: a server, or its workers by a collective.

Real processes, no computing: every worker of one group of all pushes the same gradient and waits for the weights, over
and over. Contestants take turns; ratios are of the same round.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from harness import record
from harness.serving import served
from harness.workers import run_workers
from torch.utils.data import DataLoader, TensorDataset

import evenstep

ROOT = "grouped:groups=1"
CONTESTANTS = {"the root sums": ROOT, "the workers sum": f"{ROOT},push_to=leader"}
MEGABYTES = (0.1, 4, 25)
WORKERS = (2, 4)


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--exchanges", type=int, default=20, help="timed in a round")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.exchanges = 1, 5
    figures, raw = [], {}
    for workers in WORKERS:
        for megabytes in MEGABYTES:
            with tempfile.TemporaryDirectory() as folder:
                plan = (int(megabytes * 250_000), options.rounds, options.exchanges, folder)
                times = run_workers(workers, _measure, plan, record.console.print)
            case = f"{workers} workers, {megabytes:g} MB"
            raw[case] = times
            figures += [record.figure(f"{case}: {name}", each, unit="ms") for name, each in times.items()]
            base, other = times.values()
            ratios = [ours / theirs for theirs, ours in zip(base, other, strict=True)]
            figures.append(record.figure(f"{case}: the workers sum, times the root", ratios))
    done = record.publish(
        "group_sums",
        "An exchange of one group on one host, by who sums its gradients, two cores",
        options,
        config={
            "rounds": options.rounds,
            "exchanges": options.exchanges,
            "contestants": CONTESTANTS,
            "dtype": "float32",
        },
        figures=figures,
        raw=raw,
    )
    return 0 if done else 1


def _measure(rank, plan, tell):
    elements, rounds, exchanges, folder = plan
    times = {name: [] for name in CONTESTANTS}
    for number in range(rounds):
        for name in reversed(CONTESTANTS) if number % 2 else CONTESTANTS:
            own = Path(folder, f"{number}-{len(times[name])}-{list(CONTESTANTS).index(name)}")
            times[name].append(1000 * _exchange(CONTESTANTS[name], elements, exchanges, own))
            tell(f"  {dist.get_world_size()} workers, {4 * elements / 1e6:g} MB, {name}: {times[name][-1]:.2f} ms")
    return times


def _exchange(scheme, elements, exchanges, folder):
    """The median seconds of an exchange."""
    model = torch.nn.Linear(elements, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    # A few more come first, for connections and memory.
    count = (exchanges + 3) * dist.get_world_size()
    loader = DataLoader(TensorDataset(torch.zeros(count, 1)), batch_size=1)
    taken = []
    with served(scheme, folder):
        model, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme=scheme, run_dir=folder)
        gradient = torch.ones_like(model.module.weight)
        for _ in loader:
            model.module.weight.grad = gradient
            began = time.perf_counter()
            optimizer.step()
            taken.append(time.perf_counter() - began)
        dist.barrier()
        loader.close()
    return median(taken[3:])


if __name__ == "__main__":
    sys.exit(main())
