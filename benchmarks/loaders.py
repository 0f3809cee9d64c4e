"""Samples/s of the prepared loader beside torch's own DataLoader, by turns, in one process.

Nothing is computed on the batches: what an iteration costs beside them is overhead.py's. A round is as many epochs as
take torch a third of a second, since an epoch of large batches alone is over before data workers are in step. CPU time
is that of the process and of its data workers together.
"""

import os
import sys
import time

import psutil
import torch
from harness import record
from torch.utils.data import DataLoader, Dataset, TensorDataset

import evenstep

ROWS, IMAGES, FEATURES = 8192, 512, 256
NUM_WORKERS = (0, 2, 4)
ROUNDS = 9
ROUND_SECONDS = 0.33
GOAL = ">= 0.95"


class Rows(Dataset):
    """Rows of 1 KB with a label, fetched one by one."""

    def __init__(self):
        self.rows = torch.arange(ROWS * FEATURES, dtype=torch.float32).reshape(ROWS, FEATURES)
        self.labels = list(range(ROWS))

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return self.rows[index], self.labels[index]


class Lists(Rows):
    """Rows that are fetched in lists."""

    def __getitems__(self, indices):
        return list(zip(self.rows[indices], [self.labels[index] for index in indices], strict=True))


class Dicts(Rows):
    """Two rows of 1 KB and a label, by name."""

    def __getitem__(self, index):
        return {"inputs": self.rows[index], "mask": self.rows[index], "label": self.labels[index]}


class Lengths(Rows):
    """Rows of 32 to 255 numbers."""

    def __getitem__(self, index):
        return self.rows[index, : 32 + index % 224], self.labels[index]


class Noisy(Rows):
    """Rows with noise, drawn from torch's global generator."""

    def __getitem__(self, index):
        return self.rows[index] + torch.randn(FEATURES), self.labels[index]


class Images(Dataset):
    """Images of 150 KB with a label."""

    def __init__(self):
        self.images = torch.zeros(IMAGES, 3, 224, 224, dtype=torch.uint8)

    def __len__(self):
        return IMAGES

    def __getitem__(self, index):
        return self.images[index], index


def padded(samples):
    """A collate function of the user's own."""
    rows, labels = zip(*samples, strict=True)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(labels)


# By case: the dataset, the batch size, options of the loader, and whether there is a goal.
CASES = {
    "rows of 1 KB": (Rows, 64, {}, True),
    "TensorDataset": (lambda: TensorDataset(Rows().rows, torch.arange(ROWS)), 512, {}, True),
    "images of 150 KB": (Images, 32, {}, True),
    "dicts": (Dicts, 64, {}, True),
    "lengths with a collate": (Lengths, 64, {"collate_fn": padded}, True),
    "rows of 1 KB by 512": (Rows, 512, {}, True),
    "rows in lists": (Lists, 64, {}, False),
    "rows with noise": (Noisy, 64, {}, False),
}


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--num-workers", type=int, nargs="*", default=NUM_WORKERS)
    options = parser.parse_args()
    torch.set_num_threads(1)  # As in a worker that torchrun has started.
    raw, figures, began = {}, [], os.getloadavg()
    for workers in options.num_workers:
        for name in options.cases:
            case = f"{name}, num_workers={workers}"
            raw[case] = _measure(name, workers, options)
            figures += _figures(case, raw[case], GOAL if CASES[name][3] else None)
            record.console.print(record.row(figures[-2]), record.row(figures[-1]))
    config = {
        "samples": {"images": IMAGES, "others": ROWS}, "rounds": 2 if options.quick else ROUNDS,
        "load_average": [began, os.getloadavg()],
        "batch_sizes": {name: CASES[name][1] for name in options.cases}, "persistent_workers": True, "shuffle": True,
    }  # fmt: skip
    title = "The prepared loader beside torch's DataLoader: times its samples/s, and its CPU time a sample over ours"
    done = record.publish("loaders", title, options, config=config, figures=figures, raw=raw)
    return 0 if done else 1


def _measure(name, workers, options):
    """Microseconds a sample of each loader in each round: by the clock, and of CPU."""
    torch.manual_seed(options.seed)
    make, batch_size, extra, _ = CASES[name]
    dataset, model = make(), torch.nn.Linear(1, 1)

    def loader():
        settings = {"num_workers": workers, "persistent_workers": workers > 0, **extra}
        return DataLoader(dataset, batch_size=batch_size, shuffle=True, **settings)

    ours = evenstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader(), seed=options.seed)[2]
    loaders = {"torch": loader(), "evenstep": ours}
    for each in loaders.values():
        _epochs(each, 1)
    lasts = ROUND_SECONDS / (10 if options.quick else 1)
    epochs = max(1, round(lasts / _epochs(loaders["torch"], 1)[0]))
    taken = {kind: [] for kind in loaders}
    for turn in range(2 if options.quick else ROUNDS):
        for kind in list(loaders)[:: 1 if turn % 2 else -1]:
            taken[kind].append([1e6 * each / len(dataset) / epochs for each in _epochs(loaders[kind], epochs)])
    ours.close()
    return taken


def _epochs(loader, count):
    """Seconds of so many epochs: by the clock, and of CPU."""
    processes = [psutil.Process(), *psutil.Process().children()]
    cpu, began = sum(map(_cpu, processes)), time.perf_counter()
    for _ in range(count):
        for _ in loader:
            pass
    wall = time.perf_counter() - began
    return wall, sum(map(_cpu, processes)) - cpu


def _cpu(process):
    times = process.cpu_times()
    return times.user + times.system


def _figures(case, taken, goal):
    rounds = list(zip(taken["torch"], taken["evenstep"], strict=True))
    return [
        record.figure(f"{case}: samples/s", [plain[0] / ours[0] for plain, ours in rounds], goal=goal),
        # The kernel counts CPU time in steps of 10 ms, so that of a round says little.
        record.figure(f"{case}: CPU", [sum(p[1] for p in taken["torch"]) / sum(o[1] for o in taken["evenstep"])]),
    ]


if __name__ == "__main__":
    sys.exit(main())
