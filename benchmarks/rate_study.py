"""Which learning rate and momentum an asynchronous commit should use: rules compared on real gradients in virtual time.

One process plays a server and its workers: a queue of events in virtual time decides whose gradient is committed next
and on which weights it was computed; everything else is real training. Workers push equal parts of the global batch, or
parts in proportion to their speeds where the cluster is balanced. Every rule sees the same events, samples and first
weights, so that they are trained side by side, as one stack.
"""

import heapq
import sys
import time
from hashlib import sha256
from statistics import mean, pstdev
from typing import NamedTuple

import numpy as np
import torch
from harness import record
from sklearn.datasets import load_digits

from evenstep.core.sync.rate import RatedStep, commit_step, look_ahead

SEEDS, JITTER = 3, 0.1
CLUSTERS = {
    "4 equal": [1.0] * 4, "4 of 1:1:2:4": [1.0, 1.0, 2.0, 4.0], "4, one 4x slower": [1.0] * 3 + [0.25],
    "4 of 1:1:2:4, balanced": [1.0, 1.0, 2.0, 4.0],
    "16 equal": [1.0] * 16, "16 of 1:1:2:4": [1.0, 1.0, 2.0, 4.0] * 4, "16, one 4x slower": [1.0] * 15 + [0.25],
}  # fmt: skip
KINDS = {
    "SGD": {"momentum": 0.0, "nesterov": False, "dampening": 0.0},
    "SGD momentum 0.9": {"momentum": 0.9, "nesterov": False, "dampening": 0.0},
    "SGD Nesterov 0.9": {"momentum": 0.9, "nesterov": True, "dampening": 0.0},
    "Adam": {"betas": (0.9, 0.999), "weight_decay": 0.0},
    "AdamW": {"betas": (0.9, 0.999), "weight_decay": 0.01},
}
GRIDS = {
    "SGD": [0.1 * 2**k for k in range(7)],
    "SGD momentum 0.9": [0.0125 * 2**k for k in range(8)],
    "SGD Nesterov 0.9": [0.0125 * 2**k for k in range(8)],
    "Adam": [0.001 * 2**k for k in range(8)],
    "AdamW": [0.001 * 2**k for k in range(8)],
}
LETTERS_CLUSTERS = ("4 equal", "4 of 1:1:2:4", "16, one 4x slower")
DECISION_5 = "As in the first measurement: digits, 6 epochs in batches of 512"
LETTERS = " abcdefghijklmnopqrstuvwxyz.,'_("


# The rules.


class Rule(NamedTuple):
    """step: (options, share, staleness in global batches and in versions) -> a `core.sync.rate.RatedStep`.

    ahead: (options, staleness in versions) -> how many momentum buffers the weights that are given out are moved on by.
    """

    step: object
    ahead: object = None


OURS = Rule(
    lambda given, share, batches, versions: commit_step(given, share=share, behind=batches, commits=versions),
    look_ahead,
)


def _by_commits(part=0.3, compensation=3.0, ahead=look_ahead):
    """As in 0.2.0, or with another part of the gain taken back at a staleness of one global batch, or less made up for.

    Momentum counts commits.
    """

    def step(given, share, batches, _):
        gain = 1 / (1 - given.get("momentum", 0.0))
        return RatedStep(given, share / (1 + part * batches * (gain - 1)), compensation)

    return Rule(step, ahead)


def _rule(rate=lambda s, m, batches, versions: s, memory="kept"):
    def step(given, share, batches, versions):
        new = dict(given)
        momentum = given["betas"][0] if "betas" in given else given["momentum"]
        new["lr"] = given["lr"] * rate(share, momentum, batches, versions)
        power = {"kept": 1.0, "power": share, "damped": share, "inverse": 1 / share, "none": None}[memory]
        if "betas" in given:
            new["betas"] = tuple(beta**power for beta in given["betas"]) if power else (0.0, given["betas"][1])
        else:
            new["momentum"] = momentum**power if power else 0.0
            if memory == "damped":
                new["dampening"] = 1 - (1 - new["momentum"]) / (1 - momentum)
        return RatedStep(new)

    return Rule(step)


def _times(bound):
    return lambda s, m, batches, versions: s * bound(m, batches, versions)


def _horizon(part):
    """1 at no staleness, and falling with it the more, the longer the momentum remembers."""
    return _times(lambda m, batches, _: 1 / (1 + part * batches * m / (1 - m)))


def _over(limit):
    return _times(lambda m, batches, _: min(1.0, limit / max(batches, 1e-9)))


_versions = _times(lambda m, _, versions: 1 / max(1, versions))
RULES = {
    "ours": OURS,
    "raw": Rule(lambda given, share, batches, _: commit_step(given, share=share, behind=batches, rule="raw")),
    "ours, without looking ahead": Rule(OURS.step),
    "by commits (0.2.0)": _by_commits(),
    "by commits, nothing made up for": _by_commits(compensation=0.0),
    "by commits, neither": _by_commits(compensation=0.0, ahead=None),
    "by commits, the whole gain taken back": _by_commits(part=1.0),
    "by commits, half of it": _by_commits(part=0.5),
    "by commits, half of it, nothing made up for": _by_commits(part=0.5, compensation=0.0),
    "by commits, none of it": _by_commits(part=0.0),
    "lr s": _rule(),
    "lr s, mu^s (Decision 5)": _rule(memory="power"),
    "lr s, mu^s damped": _rule(memory="damped"),
    "lr s, mu^(1/s)": _rule(memory="inverse"),
    "lr s / max(1, versions)": _rule(_versions),
    "lr s / max(1, sigma)": _rule(_over(1.0)),
    "lr s min(1, 0.25/sigma)": _rule(_over(0.25)),
    "lr s min(1, 0.1/sigma)": _rule(_over(0.1)),
    "lr s / (1 + sigma mu/(1-mu))": _rule(_horizon(1.0)),
    "same, half of sigma": _rule(_horizon(0.5)),
    "same, mu^s damped": _rule(_horizon(1.0), memory="damped"),
    "same, mu 0, lr/(1-mu)": _rule(lambda s, m, batches, _: s / (1 - m) / (1 + batches * m / (1 - m)), memory="none"),
}
LONG_RULES = {
    "ours": OURS,
    **{name: RULES[name] for name in ("lr s min(1, 0.1/sigma)", "lr s / (1 + sigma mu/(1-mu))", "same, half of sigma")},
    "same, mu 0, lr/(1-mu)": RULES["same, mu 0, lr/(1-mu)"],
    "same, sigma at least 1 - s": _rule(lambda s, m, batches, _: s / (1 + max(batches, 1 - s) * m / (1 - m))),
    "same, sigma + s": _rule(lambda s, m, batches, _: s / (1 + (batches + s) * m / (1 - m))),
}
PLAIN_RULES = {
    name: rule
    for name, rule in RULES.items()
    if not any(word in name for word in ("mu", "same", "ours,", "by commits"))
}
"""Without momentum the others equal `lr s`."""
ADAM_RULES = {
    **{name: rule for name, rule in RULES.items() if not any(word in name for word in ("mu^", "mu 0", "by commits"))},
    "lr s, betas^s": _rule(memory="power"),
    "lr sqrt(s), betas^s": _rule(lambda s, m, batches, _: s**0.5, memory="power"),
    "lr s / (1 + sigma mu/(1-mu)), betas^s": _rule(_horizon(1.0), memory="power"),
}


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


def digits(*, hidden=32, batch=128, epochs=10):
    data = load_digits()
    images = torch.tensor((data.images / 16).astype(np.float32).reshape(-1, 64))
    truth = torch.tensor(data.target)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:360], order[360:]
    return Task("digits", (images[train], truth[train]), (images[test], truth[test]),
                hidden=hidden, classes=10, batch=batch, epochs=epochs)  # fmt: skip


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


# The optimizers of torch, stacked: one learning rate and one momentum per rule.


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
            rows = [(*factors, o["lr"], *o["betas"], o["weight_decay"]) for o, *factors in steps]
        else:
            rows = [(*factors, o["lr"], o["momentum"], o["dampening"], float(o["nesterov"])) for o, *factors in steps]
        return torch.tensor(rows).T[:, None, :, None]

    def _sgd(self, gradient, rate, momentum, dampening, nesterov):
        first = self.mean is None
        self.mean = gradient.clone() if first else self.mean.mul_(momentum).addcmul_(gradient, 1 - dampening)
        looked_ahead = torch.addcmul(gradient, momentum, self.mean)
        direction = torch.where(nesterov > 0, looked_ahead, torch.where(momentum > 0, self.mean, gradient))
        self.weights = self.weights - rate * direction

    def _adam(self, gradient, rate, beta1, beta2, decay):
        if self.mean is None:
            self.mean, self.square = torch.zeros_like(gradient), torch.zeros_like(gradient)
        self.mean = self.mean * beta1 + gradient * (1 - beta1)
        self.square = self.square * beta2 + gradient * gradient * (1 - beta2)
        corrected = (self.square / (1 - beta2.double() ** self.steps).float()).sqrt_().add_(1e-8)
        rate_corrected = rate / (1 - beta1.double() ** self.steps).float()
        # Adam has no decay here, AdamW's is decoupled.
        self.weights = self.weights * (1 - rate * decay) - rate_corrected * self.mean / corrected


def _distance(run, stale, batches):
    """How far on the weights are for a worker whose last push was stale by so much, as the next may be."""
    rule, options = run
    if rule.ahead is None or not stale:
        return 0.0
    return rule.ahead(rule.step(options, batches / stale, batches, stale).options, stale)


def train(task, runs, speeds, seeds, *, parts=None):
    """Test accuracy of each run, of shape [seeds, runs]; a run is (rule, options). One worker is BSP.

    Workers push `parts` of the global batch, equal ones by default, and do so many of these in the time of a `speed`.
    """
    parts = parts or [1.0] * len(speeds)
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
            lambda stale=stale, batches=batches, share=share: [rule.step(o, share, batches, stale) for rule, o in runs],
        )  # fmt: skip
        staleness.append(batches)
        version += 1
        committed += rows.shape[1]
        pull(worker, now, stale, batches)
    return task.accuracy(stack.weights).tolist(), mean(staleness)


def tuned(task, kind, seeds):
    """The best of the grid under BSP, twice it, and the whole grid's accuracies by rate."""
    grid = GRIDS[kind]
    runs = [(RULES["raw"], {**KINDS[kind], "lr": rate}) for rate in [*grid, 2 * grid[-1]]]
    accuracies, _ = train(task, runs, [1.0], seeds)
    by_rate = {run[1]["lr"]: column for run, column in zip(runs, zip(*accuracies, strict=True), strict=True)}
    best = max(grid, key=lambda rate: mean(by_rate[rate]))
    return [best, 2 * best], by_rate


def _parts(cluster):
    return CLUSTERS[cluster] if "balanced" in cluster else None


def compare(task, rules_of, clusters, seeds, rates=None):
    """Rows of figures: one per cluster, kind, rate and rule."""
    rows, runs, names = [], [], []
    for kind, rules in rules_of.items():
        best, by_rate = tuned(task, kind, seeds)
        if rates is not None:
            accuracies, _ = train(task, [(RULES["raw"], {**KINDS[kind], "lr": r}) for r in rates], [1.0], seeds)
            best, by_rate = rates, dict(zip(rates, zip(*accuracies, strict=True), strict=True))
        for rate in best:
            rows.append({"task": task.name, "cluster": "BSP", "kind": kind, "rate": rate, "at": best.index(rate),
                         "rule": "BSP", "accuracies": list(by_rate[rate])})  # fmt: skip
            names += [(kind, rate, best.index(rate), rule) for rule in rules]
            runs += [(rules[rule], {**KINDS[kind], "lr": rate}) for rule in rules]
    for cluster in clusters:
        began = time.monotonic()
        accuracies, staleness = train(task, runs, CLUSTERS[cluster], seeds, parts=_parts(cluster))
        for (kind, rate, at, rule), column in zip(names, zip(*accuracies, strict=True), strict=True):
            rows.append({"task": task.name, "cluster": cluster, "kind": kind, "rate": rate, "at": at, "rule": rule,
                         "accuracies": list(column), "mean_staleness": staleness})  # fmt: skip
        record.console.print(f"  {task.name}, {', '.join(rules_of)}, {cluster}: {time.monotonic() - began:.0f} s")
    return rows


# What is shown.


def _points(row):
    values = [100 * value for value in row["accuracies"]]
    return f"{mean(values):.1f} +- {pstdev(values):.1f}"


def _table(rows, title, task, kind, at):
    chosen = [row for row in rows if (row["task"], row["kind"], row["at"]) == (task, kind, at)]
    bsp = next(row for row in chosen if row["rule"] == "BSP")
    clusters = [name for name in CLUSTERS if any(row["cluster"] == name for row in chosen)]
    by = {(row["rule"], row["cluster"]): row for row in chosen}
    lines = [["BSP", *[_points(bsp)] * len(clusters)]]
    rules = dict.fromkeys(row["rule"] for row in chosen if row["rule"] != "BSP")
    lines += [[rule, *(_points(by[rule, cluster]) for cluster in clusters)] for rule in rules]
    return record.table(f"{title}, {kind}, lr {bsp['rate']:g}", ("rule", *clusters), lines)


def _losses(rows, rule, kind, task):
    """Points lost against BSP at the tuned rate, one value per cluster."""
    chosen = [row for row in rows if (row["task"], row["kind"], row["at"]) == (task, kind, 0)]
    bsp = mean(next(row["accuracies"] for row in chosen if row["rule"] == "BSP"))
    return [100 * (bsp - mean(row["accuracies"])) for row in chosen if row["rule"] == rule]


def main():
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    parser = record.arguments(__doc__)
    parser.add_argument("--long", action="store_true", help="digits three times as long, under the rules that held")
    options = parser.parse_args()
    seeds = [options.seed + number for number in range(1 if options.quick else SEEDS)]
    clusters = ["4 equal"] if options.quick else list(CLUSTERS)
    language, fingerprint = letters()
    momentum = {"SGD momentum 0.9": RULES}
    sgd = {"SGD": PLAIN_RULES, **momentum, "SGD Nesterov 0.9": RULES}
    if options.long:
        plans = [(digits(epochs=30), clusters, [dict.fromkeys(list(sgd)[1:], LONG_RULES)])]
    else:
        plans = [
            (digits(), clusters, [sgd, {"Adam": ADAM_RULES, "AdamW": ADAM_RULES}]),
            (language, [name for name in clusters if name in LETTERS_CLUSTERS], [sgd, {"Adam": ADAM_RULES}]),
        ]
    first = compare(digits(hidden=64, batch=512, epochs=6), momentum, ["16 equal"], seeds, [0.05, 0.1, 0.2])
    rows = []
    for task, of_task, families in plans:
        for rules_of in families:
            rows += compare(task, rules_of, of_task, seeds)
    cases = [(task.name, kind, rules) for task, _, families in plans for of in families for kind, rules in of.items()]
    figures = [
        record.figure(f"{task}, {kind}: points lost to BSP, {rule}", _losses(rows, rule, kind, task))
        for task, kind, rules in cases
        for rule in rules
    ]
    done = record.publish(
        "rate_study-long" if options.long else "rate_study",
        "Learning rate and momentum of an asynchronous commit, by rule: test accuracy at equal global samples",
        options,
        config={
            "clusters": CLUSTERS, "jitter": JITTER, "seeds": seeds, "optimizers": KINDS, "grids": GRIDS,
            "digits": {"hidden": 32, "global_batch_size": 128, "epochs": plans[0][0].epochs},
            "letters": {"hidden": 24, "global_batch_size": 256, "epochs": 2, "text_sha256": fingerprint},
            "sigma": "global batches committed between pull and push",
        },
        figures=figures,
        tables=[
            *(_table(first, DECISION_5, "digits", "SGD momentum 0.9", at) for at in range(3)),
            *(_table(rows, task, task, kind, at) for task, kind, _ in cases for at in (0, 1)),
        ],
        raw={"decision_5": first, "rows": rows},
    )  # fmt: skip
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
