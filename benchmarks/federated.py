"""Federated training: accuracy over time with rounds, with balanced rounds, and without rounds.

Time is simulated, exact and the same on any machine: clients of speeds 1 to 8, or equal ones that are slow for one to
three of every ten pieces of work. Training is real: when the simulator gives a client the model, the client trains on
its own data, and its change of the model counts when the simulator says. All runs have the same number of local steps
on the same mean batch. FedAvg is `bsp` in the simulator. Beside it, Flower's own FedAvg aggregates what the same
clients train, in a process that has Flower.
"""

import json
import pickle
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from harness import record

from evenstep.cluster.slowness import Chain, Episodic
from evenstep.core.rounds import Work
from evenstep.sim import Client, FederatedScenario, simulate_rounds

SPEEDS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8)
SECONDS = 0.032
"""Of a client of speed 1 for a sample."""
MESSAGES = 2.0
"""Seconds for the model to a client and back."""
BATCH, STEPS, SEEDS = 32, 10, 3
ALPHAS = (0.1, 0.5)
HERE = Path(__file__).parent
FEDAVG, BALANCED, TAU, RATE = "FedAvg", "LB-BSP", "adaptive tau", "adaptive B and rate"
FLOWERS, BOUNDED = "Flower's own FedAvg", "LB-BSP, batches of at least 16"
METHODS = {
    FEDAVG: {"scheme": "bsp"},
    FLOWERS: {},
    BALANCED: {"scheme": "lb-bsp"},
    BOUNDED: {"scheme": "lb-bsp:minimum=16"},
    TAU: {"scheme": "lb-bsp", "mode": "steps"},
    RATE: {"scheme": "lb-bsp", "mode": "batch-and-lr"},
    "FedBuff": {"scheme": "asp", "buffer": 3, "rate": "raw"},
    "asp": {"scheme": "asp"},
    "ssp": {"scheme": "ssp:bound=3"},
    "dssp": {"scheme": "dssp:lower=3,upper=15"},
}
LASTING = [method for method in METHODS if method not in (FLOWERS, BOUNDED)]
EPISODIC = (FEDAVG, BALANCED, "asp", "ssp", "dssp")
CONSTANT = "constant rate, lasting"
CELLS = [
    *(("digits", alpha, "lasting", method) for alpha in ALPHAS for method in (*LASTING, FLOWERS)),
    *(("pictures", alpha, "lasting", method) for alpha in ALPHAS for method in LASTING),
    *(("digits", 0.5, "episodic", method) for method in EPISODIC),
    *(("digits", 0.1, CONSTANT, method) for method in (FEDAVG, BALANCED, BOUNDED)),
]
MANY, MANY_ROUNDS = 1000, 20
"""Clients and rounds of the runs that tell how long the simulator takes."""
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
    "digits": {"make": digits, "lr": 0.2, "rounds": 100},
    "pictures": {"make": pictures, "lr": 0.1, "rounds": 50},
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

    def __init__(self, task, alpha, seed, rounds, constant):
        (self.inputs, self.targets), self.test, shape = TASKS[task]["make"]()
        self.lr, self.rounds, self.constant = TASKS[task]["lr"], rounds, constant
        torch.manual_seed(seed)
        self.net = lenet(*shape)
        self.weights = torch.nn.utils.parameters_to_vector(self.net.parameters()).detach()
        self.parts = split(self.targets, alpha, np.random.default_rng(seed))
        self.orders = [np.random.default_rng((seed, client)) for client in range(len(self.parts))]
        self.rows = [np.empty(0, dtype=np.int64) for _ in self.parts]  # What each client draws next.
        self.changes, self.done, self.curve = {}, 0.0, []
        self.evaluate(0.0)

    def drawn(self, client, size):
        """The client's next rows: all of its data in a random order, and then again in another one."""
        while len(self.rows[client]) < size:
            again = self.orders[client].permutation(self.parts[client])
            self.rows[client] = np.concatenate([self.rows[client], again])
        rows, self.rows[client] = self.rows[client][:size], self.rows[client][size:]
        return torch.from_numpy(rows)

    def begin(self, client, number, work):
        parameters = list(self.net.parameters())
        torch.nn.utils.vector_to_parameters(self.weights.clone(), parameters)
        left = 1.0 if self.constant else min(2.0 * (1.0 - self.done / self.rounds), 1.0)
        for _ in range(work.steps):
            rows = self.drawn(client, work.batch_size)
            loss = torch.nn.functional.cross_entropy(self.net(self.inputs[rows]), self.targets[rows])
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-self.lr * left * work.rate)
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


def one(cell, folder, flower):
    """One training; what is in the folder already is taken from there."""
    task, alpha, regime, method, seed, rounds = cell
    path = folder and folder / f"{'-'.join(map(str, cell))}.json"
    if path and path.exists():
        return json.loads(path.read_text())
    torch.set_num_threads(1)
    training = Training(task, alpha, seed, rounds, regime == CONSTANT)
    speeds = [4.0] * len(SPEEDS) if regime == "episodic" else SPEEDS
    clients = tuple(
        Client(examples=len(part), seconds_per_sample=SECONDS / speed, message_seconds=MESSAGES)
        for part, speed in zip(training.parts, speeds, strict=True)
    )
    if method == FLOWERS:
        seconds, stale, pieces = flowers(training, clients, rounds, flower)
    else:
        slow = Episodic(factor=8.0, period=10, shortest=1, longest=3, seed=seed)
        scenario = FederatedScenario(
            clients=clients, rounds=rounds, batch_size=BATCH, steps=STEPS,
            disturbance=slow if regime == "episodic" else Chain(), **METHODS[method],
        )  # fmt: skip
        run = simulate_rounds(scenario, training)
        seconds, stale, pieces = run.seconds, fmean(update.stale for update in run.updates), run.pieces
    if training.curve[-1][0] < seconds:
        training.evaluate(seconds)
    last = [accuracy for _, done, accuracy in training.curve if done >= 0.9 * training.done]
    row = {
        "task": task, "alpha": alpha, "regime": regime, "method": method, "seed": seed, "seconds": seconds,
        "final": fmean(last), "stale": stale, "pieces": pieces, "curve": training.curve,
    }  # fmt: skip
    if path:
        path.with_suffix(".part").write_text(json.dumps(row))
        path.with_suffix(".part").rename(path)
    return row


def flowers(training, clients, rounds, python):
    """Train for these rounds by what Flower's FedAvg says; the seconds, the staleness and each client's rounds."""
    slowest = max(client.message_seconds + STEPS * BATCH * client.seconds_per_sample for client in clients)
    command = [python, "-m", "contestants.flower_fedavg", str(len(clients)), str(rounds)]
    with subprocess.Popen(
        command, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        answer = training.weights.numpy()
        for number in range(2 * rounds + 1):
            pickle.dump(answer, process.stdin)
            process.stdin.flush()
            asked, at, weights = pickle.load(process.stdout)
            training.weights = torch.from_numpy(weights.copy())
            if asked == "evaluate":
                training.done, answer = float(at), None
                if at:
                    training.evaluate(at * slowest)
                continue
            answer = []
            for client, part in enumerate(training.parts):
                training.begin(client, number, Work(BATCH, STEPS))
                answer.append(((training.weights + training.changes.pop((client, number))).numpy(), len(part)))
        pickle.dump(None, process.stdin)
    return rounds * slowest, 0.0, [rounds] * len(clients)


def main():
    parser = record.arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--rows", type=Path, help="a folder that keeps each training, to go on from when interrupted")
    parser.add_argument(
        "--flower", type=Path, default=HERE.parent / ".venv-flower" / "bin" / "python", metavar="PATH",
        help="an interpreter with Flower (default: .venv-flower/bin/python, which make test-all builds)",
    )  # fmt: skip
    options = parser.parse_args()
    if not options.flower.exists():
        parser.error(f"there is no {options.flower}: run make test-all, or give --flower PATH")
    # Where rows and Flower are on this machine is not part of the record's command.
    elsewhere = ("--rows", "--flower")
    sys.argv = [word for before, word in pairwise(["", *sys.argv]) if not {before, word} & set(elsewhere)]
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
        rows = pool.map(partial(one, folder=options.rows, flower=options.flower.absolute()), cells, chunksize=1)
    record.console.print(f"  {len(rows)} trainings in {(time.monotonic() - began) / 60:.1f} minutes")
    _set_times(rows)
    done = record.publish(
        "federated",
        f"Federated training on {len(SPEEDS)} clients",
        options,
        config={
            "speeds": SPEEDS, "seconds_per_sample_at_speed_1": SECONDS, "message_seconds": MESSAGES,
            "mean_batch": BATCH, "steps": STEPS, "seeds": seeds,
            "dirichlet": ALPHAS,
            "methods": METHODS,
            "tasks": {name: {"lr": task["lr"], "rounds": task["rounds"]} for name, task in TASKS.items()},
            "rate": "as given in the first half of the rounds, then falling to 0 in a line; or constant",
            "batches": "a client draws all of its data in a random order, then again in another one",
            "time": "simulated: a busy machine changes nothing; the training is real",
            "episodic": "all of speed 4, each 8 times slower for 1 to 3 of every 10 pieces of work",
            "seconds_to": f"{BELOW} points below FedAvg's final accuracy",
        },
        figures=[
            *_figures(rows),
            *(
                record.figure(f"simulator, {MANY:,} clients x {MANY_ROUNDS} rounds, {method}", [seconds], unit="s")
                for method, seconds in _simulator_seconds().items()
            ),
        ],
        tables=[_table(rows, *which) for which in dict.fromkeys(cell[:3] for cell in CELLS)],
        raw=rows,
    )  # fmt: skip
    return 0 if done else 1


def _simulator_seconds():
    """How long the simulator takes for many clients, without training, by scheme."""
    generator = np.random.default_rng(0)
    clients = tuple(
        Client(examples=int(examples), seconds_per_sample=SECONDS / speed, message_seconds=MESSAGES)
        for examples, speed in zip(
            generator.integers(50, 500, MANY), generator.uniform(SPEEDS[0], SPEEDS[-1], MANY), strict=True
        )
    )
    seconds = {}
    for method in (BALANCED, "ssp", "dssp", "asp"):
        began = time.perf_counter()
        simulate_rounds(FederatedScenario(clients=clients, rounds=MANY_ROUNDS, steps=STEPS, **METHODS[method]))
        seconds[method] = time.perf_counter() - began
    return seconds


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
    values = [(of[*key, method], of[*key, against]) for key in keys if (*key, against) in of]
    return [1e9 if one is None else 0.0 if other is None else one / max(other, 1e-9) for one, other in values]


def _differences(rows, regime, method, against=FEDAVG):
    of = {(*_key(row), row["method"]): row["final"] for row in rows if row["regime"] == regime}
    both = [key for key in of if key[-1] == method and (*key[:-1], against) in of]
    return [of[key] - of[*key[:-1], against] for key in both]


def _figures(rows):
    def time_to(method, against, regime="lasting", goal=None):
        begin = "" if regime == "lasting" else f"{regime.removesuffix(', lasting')}: "
        values = _ratios(rows, regime, method, against, "seconds_to_target")
        return record.figure(f"{begin}{method}'s time to the accuracy, of {against}'s", values, goal=goal)

    def less(method, against=FEDAVG, regime="lasting", goal=None):
        begin = "" if regime == "lasting" else f"{regime.removesuffix(', lasting')}: "
        values = _differences(rows, regime, method, against)
        return record.figure(f"{begin}{method}'s final accuracy less {against}'s", values, goal=goal, unit="points")

    return [
        time_to(BALANCED, FEDAVG, goal="<= 0.72"),
        time_to(BALANCED, FLOWERS, goal="<= 0.72"),
        record.figure("LB-BSP's time of a round, of FedAvg's", _ratios(rows, "lasting", BALANCED, FEDAVG, "seconds")),
        less(BALANCED, goal=">= -0.5"),
        less(BALANCED, FLOWERS, goal=">= -0.5"),
        less(FLOWERS),
        *(less(method) for method in LASTING if method not in (FEDAVG, BALANCED)),
        *(time_to(method, BALANCED) for method in (TAU, RATE)),
        time_to("dssp", BALANCED, "episodic", goal="<= 0.999"),
        *(less(method, regime=CONSTANT) for method in (BALANCED, BOUNDED)),
        *(time_to(method, FEDAVG, CONSTANT) for method in (BALANCED, BOUNDED)),
    ]


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
    return record.table(f"{task}, Dirichlet {alpha}, {regime}", headings, lines)


if __name__ == "__main__":
    sys.exit(main())
