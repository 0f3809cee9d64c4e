"""At which rate a group's gradient should enter: every rule that `rate=` knows, on real gradients in virtual time.

One process plays a server and its groups: a queue of events in virtual time decides whose gradient is committed next
and on which weights it was computed; everything else is real training. A group is a worker that pushes its part of the
global batch and takes as long as its slowest member; one of 16 is four times slower. Every rule sees the same events,
samples and first weights, so that they are trained side by side, as one stack.
"""

import heapq
import itertools
import sys
import time
from hashlib import sha256
from statistics import mean, pstdev

import numpy as np
import torch
from harness import record
from sklearn.datasets import load_digits

from evenstep.core.sync.rate import RATES, commit_step, look_ahead

SLOWDOWN, SEEDS = 4.0, 5
EQUAL = {f"{count} groups": [16 // count] * count for count in (2, 4, 8, 16)}
CASES = {"15 + the slow one": [15, 1], **EQUAL}
"""Members of each group; the last one has the slow worker. The first are the groups of `groups=progressive`."""
CHOSEN = "15 + the slow one"
LARGEST_LOSS = "<= 1"
JITTER = 0.1
KINDS = {
    "SGD": {"momentum": 0.0, "dampening": 0.0},
    "SGD momentum 0.9": {"momentum": 0.9, "dampening": 0.0},
    "Adam": {"betas": (0.9, 0.999)},
}
GRIDS = {
    "SGD": [0.1 * 2**k for k in range(7)],
    "SGD momentum 0.9": [0.0125 * 2**k for k in range(8)],
    "Adam": [0.001 * 2**k for k in range(8)],
}
LETTERS = " abcdefghijklmnopqrstuvwxyz.,'_("


def main():
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    options = record.arguments(__doc__).parse_args()
    seeds = [options.seed + number for number in range(1 if options.quick else SEEDS)]
    language, fingerprint = letters()
    rows = [row for task in ((digits(),) if options.quick else (digits(), language)) for row in _study(task, seeds)]
    done = record.publish(
        "group_rates",
        "Rules for the rate of a group's commit: test accuracy at equal global samples, one worker of 16 4x slower",
        options,
        config={
            "groups": CASES, "slowdown": SLOWDOWN, "rules": RATES, "seeds": seeds,
            "optimizers": KINDS, "grids": GRIDS,
            "digits": {"hidden": 32, "global_batch_size": 128, "epochs": 10},
            "letters": {"hidden": 24, "global_batch_size": 256, "epochs": 2, "text_sha256": fingerprint},
        },
        figures=_figures(rows),
        tables=_tables(rows),
        raw=rows,
    )  # fmt: skip
    return 0 if done else 1


def _study(task, seeds):
    """A row for each optimizer, rate (the tuned one and twice it), groups and rule; a whole barrier has no rule."""
    rows = []
    for kind in KINDS:
        began = time.monotonic()
        best, by_rate = tuned(task, kind, seeds)
        names = list(itertools.product((0, 1), RATES))
        runs = [(name, {**KINDS[kind], "lr": best[at]}) for at, name in names]
        for at, rate in enumerate(best):
            rows.append(_row(task, kind, rate, at, "1 group", "", by_rate[rate], 0.0))
        for case, members in CASES.items():
            seconds = [1.0] * (len(members) - 1) + [SLOWDOWN]
            speeds = [count / each for count, each in zip(members, seconds, strict=True)]
            accuracies, staleness = train(task, runs, speeds, seeds, parts=members)
            for (at, name), column in zip(names, zip(*accuracies, strict=True), strict=True):
                rows.append(_row(task, kind, best[at], at, case, name, column, staleness))
        record.console.print(f"  {task.name}, {kind}: {time.monotonic() - began:.0f} s")
    return rows


def _row(task, kind, rate, at, case, name, accuracies, staleness):
    return {"task": task.name, "kind": kind, "rate": rate, "at": at, "groups": case, "rule": name,
            "accuracies": list(accuracies), "mean_staleness": staleness}  # fmt: skip


# The tasks: one hidden layer, stacked over seeds and rules.


class Task:
    def __init__(self, name, train, test, *, hidden, classes, batch, epochs):
        self.name, self.train, self.test, self.batch, self.epochs = name, train, test, batch, epochs
        inputs = train[0].shape[1]
        self.shapes = [(inputs, hidden), (1, hidden), (hidden, classes), (1, classes)]

    def first(self, seeds):
        """Weights of shape [seeds, 1, parameters]."""
        rows = []
        for seed in seeds:
            generator = torch.Generator().manual_seed(seed)
            fans = [self.shapes[0][0]] * 2 + [self.shapes[2][0]] * 2
            parts = [
                (torch.rand(shape, generator=generator) * 2 - 1) / fan**0.5
                for shape, fan in zip(self.shapes, fans, strict=True)
            ]
            rows.append(torch.cat([part.flatten() for part in parts]))
        return torch.stack(rows)[:, None]

    def scores(self, weights, inputs):
        parts, start = [], 0
        for rows, columns in self.shapes:
            parts.append(weights[..., start : start + rows * columns].unflatten(-1, (rows, columns)))
            start += rows * columns
        return torch.relu(inputs @ parts[0] + parts[1]) @ parts[2] + parts[3]

    def gradient(self, weights, rows):
        weights = weights.detach().requires_grad_()
        scores = self.scores(weights, self.train[0][rows][:, None])
        truth = self.train[1][rows][:, None, :, None].expand(*scores.shape[:3], 1)
        losses = torch.logsumexp(scores, dim=-1) - scores.gather(-1, truth)[..., 0]
        losses.mean(dim=-1).sum().backward()
        return weights.grad

    def accuracy(self, weights):
        """Of shape [seeds, rules]; what diverged has chance's part."""
        with torch.no_grad():
            scores = self.scores(weights, self.test[0][None, None])
        return (scores.argmax(dim=-1) == self.test[1]).double().mean(dim=-1)


def digits():
    data = load_digits()
    images = torch.tensor((data.images / 16).astype(np.float32).reshape(-1, 64))
    truth = torch.tensor(data.target)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:360], order[360:]
    return Task("digits", (images[train], truth[train]), (images[test], truth[test]),
                hidden=32, classes=10, batch=128, epochs=10)  # fmt: skip


def letters():
    """The next of 32 letters from the last four, in the text of Python's own help pages."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics)).lower()
    codes = np.array([LETTERS.find(letter) for letter in " ".join(text.split())])
    codes = codes[codes >= 0]
    windows = np.lib.stride_tricks.sliding_window_view(codes, 5)
    taken = np.random.default_rng(0).permutation(len(windows))[:44_400]
    inputs = np.eye(len(LETTERS), dtype=np.float32)[windows[taken, :4]].reshape(len(taken), -1)
    inputs, truth = torch.from_numpy(inputs), torch.from_numpy(windows[taken, 4].copy())
    task = Task("letters", (inputs[6000:], truth[6000:]), (inputs[:6000], truth[:6000]),
                hidden=24, classes=len(LETTERS), batch=256, epochs=2)  # fmt: skip
    return task, sha256(text.encode()).hexdigest()


class Stack:
    def __init__(self, weights, adam):
        self.weights, self.adam, self.steps = weights, adam, 0
        self.mean = self.square = None
        self.columns = {}

    def step(self, gradient, computed_on, key, steps):
        if key not in self.columns:
            self.columns[key] = self._columns(steps())
        self.steps += 1
        factor, compensation, direct, *columns = self.columns[key]
        if compensation.any():
            gradient = gradient + compensation * gradient.abs() * (self.weights - computed_on)
        gradient = gradient * factor
        self.weights = self.weights - direct * gradient
        (self._adam if self.adam else self._sgd)(gradient, *columns)

    def given(self, key, distances):
        """The weights that a worker is given, moved on along the momentum."""
        if self.mean is None:
            return self.weights
        if ("given", key) not in self.columns:
            self.columns["given", key] = torch.tensor(distances())[None, :, None]
        return torch.addcmul(self.weights, self.columns["given", key], self._direction(), value=-1)

    def _direction(self):
        """The momentum, or Adam's step at rate 1; its betas are alike in all runs whose rule looks ahead."""
        if not self.adam:
            return self.mean
        beta1, beta2 = KINDS["Adam"]["betas"]
        root = (self.square / (1 - beta2**self.steps)).sqrt_().add_(1e-8)
        return self.mean / (1 - beta1**self.steps) / root

    def _columns(self, steps):
        if self.adam:
            rows = [(*factors, o["lr"], *o["betas"]) for o, *factors in steps]
        else:
            rows = [(*factors, o["lr"], o["momentum"], o["dampening"]) for o, *factors in steps]
        return torch.tensor(rows).T[:, None, :, None]

    def _sgd(self, gradient, rate, momentum, dampening):
        first = self.mean is None
        self.mean = gradient.clone() if first else self.mean.mul_(momentum).addcmul_(gradient, 1 - dampening)
        self.weights = self.weights - rate * torch.where(momentum > 0, self.mean, gradient)

    def _adam(self, gradient, rate, beta1, beta2):
        if self.mean is None:
            self.mean, self.square = torch.zeros_like(gradient), torch.zeros_like(gradient)
        self.mean = self.mean * beta1 + gradient * (1 - beta1)
        self.square = self.square * beta2 + gradient * gradient * (1 - beta2)
        corrected = (self.square / (1 - beta2.double() ** self.steps).float()).sqrt_().add_(1e-8)
        rate_corrected = rate / (1 - beta1.double() ** self.steps).float()
        self.weights = self.weights - rate_corrected * self.mean / corrected


def _step(run, share, batches, stale):
    rule, options = run
    return commit_step(options, share=share, behind=batches, commits=stale, rule=rule)


def _distance(run, stale, batches):
    """How far on the weights are for a worker whose last push was stale by so much, as the next may be."""
    return look_ahead(_step(run, batches / stale, batches, stale).options, stale, rule=run[0]) if stale else 0.0


def train(task, runs, speeds, seeds, *, parts=(1.0,)):
    """Test accuracy of each run, of shape [seeds, runs]; a run is (rule, options). One worker is BSP.

    Workers push `parts` of the global batch, and do so many of these in the time of a `speed`.
    """
    sizes = [task.batch * part / sum(parts) for part in parts]
    samples = len(task.train[1])
    draws = np.random.default_rng(len(speeds))
    orders = np.stack(
        [
            np.concatenate([np.random.default_rng([k, e]).permutation(samples) for e in range(task.epochs)])
            for k in seeds
        ]
    )
    adam = "betas" in runs[0][1]
    stack = Stack(task.first(seeds).expand(len(seeds), len(runs), -1).contiguous(), adam)
    left, taken = samples * task.epochs // task.batch * task.batch, 0
    queue, version, committed, staleness = [], 0, 0, []

    def pull(worker, now, stale, batches):
        nonlocal taken
        size = min(round(sizes[worker]), left - taken)
        if size:
            rows = torch.from_numpy(orders[:, taken : taken + size])
            taken += size
            ends = now + max(0.2, draws.normal(1.0, JITTER)) * sizes[worker] / (sizes[0] * speeds[worker])
            weights = stack.given((stale, batches), lambda: [_distance(each, stale, batches) for each in runs])
            heapq.heappush(queue, (ends, worker, weights, rows, version, committed))

    for worker in range(len(speeds)):
        pull(worker, 0.0, 0, 0.0)
    while queue:
        now, worker, weights, rows, pulled, before = heapq.heappop(queue)
        stale, batches, share = version - pulled, (committed - before) / task.batch, rows.shape[1] / task.batch
        gradient = task.gradient(weights, rows)
        stack.step(
            gradient, weights, (stale, batches, share),
            lambda stale=stale, batches=batches, share=share: [_step(run, share, batches, stale) for run in runs],
        )  # fmt: skip
        staleness.append(batches)
        version += 1
        committed += rows.shape[1]
        pull(worker, now, stale, batches)
    return task.accuracy(stack.weights).tolist(), mean(staleness)


def tuned(task, kind, seeds):
    """The best of the grid under BSP, twice it, and the whole grid's accuracies by rate."""
    grid = GRIDS[kind]
    runs = [("raw", {**KINDS[kind], "lr": rate}) for rate in [*grid, 2 * grid[-1]]]
    accuracies, _ = train(task, runs, [1.0], seeds)
    by_rate = {run[1]["lr"]: column for run, column in zip(runs, zip(*accuracies, strict=True), strict=True)}
    best = max(grid, key=lambda rate: mean(by_rate[rate]))
    return [best, 2 * best], by_rate


# What is shown.


def _of(rows, **wanted):
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _lost(rows, row):
    """Points lost against one group, on the mean of the seeds."""
    (whole,) = _of(rows, task=row["task"], kind=row["kind"], at=row["at"], groups="1 group")
    return 100 * (mean(whole["accuracies"]) - mean(row["accuracies"]))


def _figures(rows):
    figures = []
    for task, kind in dict.fromkeys((row["task"], row["kind"]) for row in rows):
        for name in RATES:
            tuned_rows = _of(rows, task=task, kind=kind, at=0, rule=name)
            figures.append(
                record.figure(f"{task}, {kind}: points lost, {name}", [_lost(rows, row) for row in tuned_rows])
            )
        (chosen,) = _of(rows, task=task, kind=kind, at=0, rule=RATES[0], groups=CHOSEN)
        figures.append(
            record.figure(
                f"{task}, {kind}: points lost by progressive groups", [_lost(rows, chosen)], goal=LARGEST_LOSS
            )
        )
    return figures


def _tables(rows):
    tables = []
    for task, kind, at in dict.fromkeys((row["task"], row["kind"], row["at"]) for row in rows):
        whole, *_ = here = _of(rows, task=task, kind=kind, at=at)
        lines = [["one group", *[_told(whole)] * len(CASES)]]
        lines += [[name, *(_told(*_of(here, rule=name, groups=case)) for case in CASES)] for name in RATES]
        staleness = [f"{_of(here, rule=RATES[0], groups=case)[0]['mean_staleness']:.2f}" for case in CASES]
        lines.append(["mean staleness, global batches", *staleness])
        which = "tuned for one group" if at == 0 else "twice the tuned one"
        tables.append(
            record.table(f"{task}, {kind}, learning rate {whole['rate']:g} ({which})", ("rule", *CASES), lines)
        )
    return tables


def _told(row):
    values = [100 * value for value in row["accuracies"]]
    return f"{mean(values):.1f} +- {pstdev(values):.1f}"


if __name__ == "__main__":
    sys.exit(main())
