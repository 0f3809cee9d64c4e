"""Federated training: accuracy over time with rounds, with balanced rounds, and without rounds.

Time is simulated, exact and the same on any machine: clients of speeds 1 to 8, or equal ones that are slow for one to
three of every ten pieces of work. Training is real: at each moment at which the simulator gives a client the model, the
client trains on its own data, and its change of the model counts when the simulator says. All runs have the same number
of local steps on the same mean batch. FedAvg is `bsp`; that this is Flower's FedAvg is a test (tests/frameworks).
"""

import json
import sys
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from harness import record

from evenstep.cluster.slowness import Episodic, Undisturbed
from evenstep.sim import Client, FederatedScenario, simulate_rounds

SPEEDS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8)
SECONDS = 0.032
"""Of a client of speed 1 for a sample."""
MESSAGES = 2.0
"""Seconds for the model to a client and back."""
BATCH, STEPS, SEEDS = 32, 10, 3
ALPHAS = (0.1, 0.5)
FEDAVG, BALANCED, TAU, RATE = "FedAvg", "LB-BSP", "adaptive tau", "adaptive B and rate"
METHODS = {
    FEDAVG: {"scheme": "bsp"},
    BALANCED: {"scheme": "lb-bsp"},
    TAU: {"scheme": "lb-bsp", "mode": "steps"},
    RATE: {"scheme": "lb-bsp", "mode": "batch-and-lr"},
    "FedBuff": {"scheme": "asp", "buffer": 3, "rate": "raw"},
    "asp": {"scheme": "asp"},
    "ssp": {"scheme": "ssp:bound=3"},
    "dssp": {"scheme": "dssp:lower=3,upper=15"},
}
EPISODIC = (FEDAVG, BALANCED, "FedBuff", "asp", "ssp", "dssp")
CELLS = [
    (task, alpha, "lasting", method) for task in ("digits", "pictures") for alpha in ALPHAS for method in METHODS
] + [("digits", 0.5, "episodic", method) for method in EPISODIC]
BELOW = 1.0
"""Points of accuracy below FedAvg's final one that time is counted to."""


def digits():
    """8 x 8 digits, and LeNet-5's layers with kernels of 3."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images, targets = torch.tensor(data.images / 16).float()[:, None], torch.tensor(data.target)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(images)))
    return (images[order[:1200]], targets[order[:1200]]), (images[order[1200:]], targets[order[1200:]]), (1, 3, 1, 64)


def pictures():
    """32 x 32 pictures in three colours, and LeNet-5: of each class three smooth patterns, shifted, under noise."""
    generator = np.random.default_rng(0)
    coarse = torch.from_numpy(generator.normal(size=(30, 3, 8, 8))).float()
    patterns = torch.nn.functional.interpolate(coarse, size=(32, 32), mode="bilinear")
    targets = torch.from_numpy(generator.integers(10, size=5000))
    chosen = patterns[targets * 3 + torch.from_numpy(generator.integers(3, size=5000))]
    shifts = generator.integers(-4, 5, size=(5000, 2)).tolist()
    images = torch.stack([picture.roll(shift, dims=(1, 2)) for picture, shift in zip(chosen, shifts, strict=True)])
    images += 1.2 * torch.from_numpy(generator.normal(size=images.shape)).float()
    return (images[:4000], targets[:4000]), (images[4000:], targets[4000:]), (3, 5, 0, 400)


TASKS = {
    "digits": {"make": digits, "lr": 0.2, "rounds": 60},
    "pictures": {"make": pictures, "lr": 0.1, "rounds": 40},
}


def lenet(colours, kernel, padding, flat):
    """LeNet-5 (LeCun et al., 1998) with ReLU and largest pooling."""
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(colours, 6, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def split(targets, alpha, generator):
    """The rows of each client: of each class a part, drawn by Dirichlet(alpha); at least a mean batch of rows each."""
    while True:
        parts = [[] for _ in SPEEDS]
        for each in range(10):
            rows = generator.permutation(np.flatnonzero(targets.numpy() == each))
            bounds = np.cumsum(generator.dirichlet([alpha] * len(SPEEDS)))[:-1] * len(rows)
            for part, some in zip(parts, np.split(rows, bounds.astype(int)), strict=True):
                part.extend(some.tolist())
        if min(map(len, parts)) >= BATCH:
            return [np.array(part) for part in parts]


class Training:
    """The model, trained when the simulator says; `curve` has seconds, rounds' worth and accuracy."""

    def __init__(self, task, alpha, seed):
        (self.inputs, self.targets), self.test, shape = TASKS[task]["make"]()
        self.lr, self.seed = TASKS[task]["lr"], seed
        torch.manual_seed(seed)
        self.net = lenet(*shape)
        self.weights = torch.nn.utils.parameters_to_vector(self.net.parameters()).detach()
        self.parts = split(self.targets, alpha, np.random.default_rng(seed))
        self.changes, self.done, self.curve = {}, 0.0, []
        self.evaluate(0.0)

    def begin(self, client, number, work):
        generator = np.random.default_rng((self.seed, client, number))
        parameters = list(self.net.parameters())
        torch.nn.utils.vector_to_parameters(self.weights.clone(), parameters)
        for _ in range(work.steps):
            rows = torch.from_numpy(generator.choice(self.parts[client], size=work.batch_size))
            loss = torch.nn.functional.cross_entropy(self.net(self.inputs[rows]), self.targets[rows])
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-self.lr * work.rate)
        trained = torch.nn.utils.parameters_to_vector(parameters).detach()
        self.changes[client, number] = trained - self.weights

    def update(self, parts, now):
        whole = sum(len(self.parts[part.node]) for part in parts)
        before, self.weights = self.weights, self.weights.clone()
        for part in parts:
            change = self.changes.pop((part.node, part.number))
            self.weights += part.factor * len(self.parts[part.node]) / whole * change
        if not torch.isfinite(self.weights).all():
            self.weights = before
        self.done += whole / len(self.targets)
        if self.done >= len(self.curve) - 1e-6:
            self.evaluate(now)

    def evaluate(self, now):
        torch.nn.utils.vector_to_parameters(self.weights.clone(), self.net.parameters())
        with torch.no_grad():
            right = (self.net(self.test[0]).argmax(dim=1) == self.test[1]).float().mean()
        self.curve.append((now, self.done, 100.0 * float(right)))


def one(cell, folder):
    """One training; what is in the folder already is taken from there."""
    task, alpha, regime, method, seed, rounds = cell
    path = folder and folder / f"{'-'.join(map(str, cell))}.json"
    if path and path.exists():
        return json.loads(path.read_text())
    torch.set_num_threads(1)
    training = Training(task, alpha, seed)
    speeds = SPEEDS if regime == "lasting" else [4.0] * len(SPEEDS)
    clients = tuple(
        Client(examples=len(part), seconds_per_sample=SECONDS / speed, message_seconds=MESSAGES)
        for part, speed in zip(training.parts, speeds, strict=True)
    )
    slow = Episodic(factor=8.0, period=10, shortest=1, longest=3, seed=seed)
    scenario = FederatedScenario(
        clients=clients, rounds=rounds, batch_size=BATCH, steps=STEPS,
        disturbance=slow if regime == "episodic" else Undisturbed(), **METHODS[method],
    )  # fmt: skip
    run = simulate_rounds(scenario, training)
    if training.curve[-1][0] < run.seconds:
        training.evaluate(run.seconds)
    last = [accuracy for _, done, accuracy in training.curve if done >= 0.9 * training.done]
    row = {
        "task": task, "alpha": alpha, "regime": regime, "method": method, "seed": seed, "seconds": run.seconds,
        "final": fmean(last), "stale": fmean(update.stale for update in run.updates), "pieces": run.pieces,
        "curve": training.curve,
    }  # fmt: skip
    if path:
        path.with_suffix(".part").write_text(json.dumps(row))
        path.with_suffix(".part").rename(path)
    return row


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--rows", type=Path, help="a folder that keeps each training, to go on from when interrupted")
    options = parser.parse_args()
    if options.rows:
        options.rows.mkdir(parents=True, exist_ok=True)
    seeds = 1 if options.quick else options.seeds
    cells = [
        (*cell, options.seed + seed, 4 if options.quick else TASKS[cell[0]]["rounds"])
        for seed in range(seeds)
        for cell in CELLS
    ]
    began = time.monotonic()
    with get_context("spawn").Pool() as pool:
        rows = pool.map(partial(one, folder=options.rows), cells, chunksize=1)
    record.console.print(f"  {len(rows)} trainings in {(time.monotonic() - began) / 60:.1f} minutes")
    _set_times(rows)
    done = record.publish(
        "federated",
        f"Federated training on {len(SPEEDS)} clients",
        options,
        config={
            "speeds": SPEEDS, "seconds_per_sample_at_speed_1": SECONDS, "message_seconds": MESSAGES,
            "mean_batch": BATCH, "steps": STEPS, "seeds": seeds, "dirichlet": ALPHAS,
            "methods": METHODS,
            "tasks": {name: {"lr": task["lr"], "rounds": task["rounds"]} for name, task in TASKS.items()},
            "time": "simulated: a busy machine changes nothing; the training is real",
            "episodic": "all of speed 4, each 8 times slower for 1 to 3 of every 10 pieces of work",
            "seconds_to": f"{BELOW} points below FedAvg's final accuracy",
        },
        figures=_figures(rows),
        tables=[_table(rows, *which) for which in dict.fromkeys(cell[:3] for cell in CELLS)],
        raw=rows,
    )  # fmt: skip
    return 0 if done else 1


def _key(row):
    return row["task"], row["alpha"], row["regime"], row["seed"]


def _set_times(rows):
    """The first moment from which two evaluations running are at the target, or None."""
    finals = {_key(row): row["final"] for row in rows if row["method"] == FEDAVG}
    for row in rows:
        target, curve = finals[_key(row)] - BELOW, row["curve"]
        reached = (
            here[0]
            for here, after in zip(curve, [*curve[1:], curve[-1]], strict=True)
            if min(here[2], after[2]) >= target
        )
        row["seconds_to_target"] = next(reached, None)


def _ratios(rows, regime, method, against, what):
    """By cell, the figure of one method over that of another; infinite where the first never gets there."""
    of = {(*_key(row), row["method"]): row[what] for row in rows if row["regime"] == regime}
    keys = [key[:-1] for key in of if key[-1] == method]
    values = [(of[*key, method], of[*key, against]) for key in keys]
    return [1e9 if one is None else 0.0 if other is None else one / max(other, 1e-9) for one, other in values]


def _differences(rows, regime, method):
    of = {(*_key(row), row["method"]): row["final"] for row in rows if row["regime"] == regime}
    return [value - of[*key[:-1], FEDAVG] for key, value in of.items() if key[-1] == method]


def _figures(rows):
    figures = [
        record.figure("LB-BSP's time to the accuracy, of FedAvg's",
                      _ratios(rows, "lasting", BALANCED, FEDAVG, "seconds_to_target"), goal="<= 0.72"),
        record.figure("LB-BSP's time of a round, of FedAvg's", _ratios(rows, "lasting", BALANCED, FEDAVG, "seconds")),
        record.figure("LB-BSP's final accuracy less FedAvg's",
                      _differences(rows, "lasting", BALANCED), goal=">= -0.5", unit="points"),
    ]  # fmt: skip
    figures += [
        record.figure(f"{method}'s final accuracy less FedAvg's", _differences(rows, "lasting", method), unit="points")
        for method in METHODS
        if method not in (FEDAVG, BALANCED)
    ]
    figures.append(
        record.figure("episodic: dssp's time to the accuracy, of LB-BSP's",
                      _ratios(rows, "episodic", "dssp", BALANCED, "seconds_to_target"), goal="<= 0.999")
    )  # fmt: skip
    return figures


def _table(rows, task, alpha, regime):
    chosen = [row for row in rows if (row["task"], row["alpha"], row["regime"]) == (task, alpha, regime)]
    lines = []
    for method in METHODS:
        of = [row for row in chosen if row["method"] == method]
        if not of:
            continue
        times = [row["seconds_to_target"] for row in of]
        reached = [each for each in times if each is not None]
        lines.append([
            method, f"{fmean(row['seconds'] for row in of) / (len(of[0]['curve']) - 1):.1f}",
            f"{fmean(row['final'] for row in of):.1f}",
            f"{fmean(reached):.0f} ({len(reached)} of {len(times)})" if reached else f"never (0 of {len(times)})",
            f"{fmean(row['stale'] for row in of):.1f}",
        ])  # fmt: skip
    headings = ("method", "seconds a round", "final accuracy", "seconds to target (seeds)", "stale")
    return record.table(f"{task}, Dirichlet {alpha}, {regime} slowness", headings, lines)


if __name__ == "__main__":
    sys.exit(main())
