"""Which runs that diverge to finite weights are warned of, and which healthy ones: real gradients in virtual time.

One process plays a server and its workers, as in rate_study.py, under the sync policies themselves. Each worker's
`Divergence` sees the gradient at the logits of its own pushes, and a run is warned of when any worker's speaks. The
decision was calibrated on other seeds than these.
"""

import dataclasses
import heapq
import sys
import time
from collections import Counter

import numpy as np
import rate_study
import torch
from harness import record, tasks

from evenstep.core.divergence import Divergence
from evenstep.core.sync import Bounded, Dynamic, Unbounded
from evenstep.core.sync.base import Push, Release

SEEDS, FIRST_SEED, JITTER = 3, 10, 0.1
TIMES = (0.5, 1, 2, 4, 8)
"""The tuned rate for bsp."""
SCHEMES = {"bsp": None, "ssp:bound=3": Bounded(bound=3), "dssp:lower=3,upper=15": Dynamic(lower=3, upper=15),
           "asp": Unbounded()}  # fmt: skip
SPEEDS = (1.0, 1.0, 2.0, 4.0)
KINDS = {name: rate_study.KINDS[name] for name in ("SGD", "SGD momentum 0.9", "Adam")}
GRIDS = {
    "SGD": [0.05 * 2**k for k in range(8)],
    "SGD momentum 0.9": [0.0125 * 2**k for k in range(8)],
    "Adam": [0.001 * 2**k for k in range(7)],
}
FATES = ("healthy", "worse", "bad", "lost", "not finite")
"""Of what tuned bsp learns beyond the commonest class, less than 5 % missing, up to 50, up to 80, more."""


class Task(rate_study.Task):
    """One of harness.tasks, as rate_study stacks it; `start` are weights to begin with, of shape [1, parameters]."""

    def __init__(self, task, name, *, batch, epochs, start=None):
        super().__init__(
            name, task.train, task.test, hidden=task.hidden, classes=task.classes, batch=batch, epochs=epochs
        )
        self.guess = float(np.bincount(task.test[1].numpy()).max() / len(task.test[1]))
        self.start = start

    def first(self, seeds):
        return super().first(seeds) if self.start is None else self.start[None].expand(len(seeds), -1, -1)

    def push(self, weights, rows, workers=1):
        """The gradient, and of each of so many equal parts [workers, seeds, runs, 2] error and excess at the logits."""
        weights = weights.detach().requires_grad_()
        scores = self.scores(weights, self.train[0][rows][:, None])
        scores.retain_grad()
        truth = self.train[1][rows][:, None, :, None].expand(*scores.shape[:3], 1)
        losses = torch.logsumexp(scores, dim=-1) - scores.gather(-1, truth)[..., 0]
        losses.mean(dim=-1).sum().backward()
        size = scores.grad.abs().sum(-1) * rows.shape[1]
        along = (scores.grad * scores.detach()).sum(-1) * rows.shape[1]
        size, along = (torch.stack([part.mean(-1) for part in each.chunk(workers, -1)]) for each in (size, along))
        return weights.grad, torch.stack((size, along / size), dim=-1).tolist()


def train(task, runs, speeds, seeds, sync):
    """Accuracy of each run, whether its weights are finite, and whether it was warned of: each [seeds, runs]."""
    stack = rate_study.Stack(task.first(seeds).expand(len(seeds), len(runs), -1).contiguous(), "betas" in runs[0])
    watches = [[[Divergence() for _ in runs] for _ in seeds] for _ in speeds]
    warned = np.zeros((len(seeds), len(runs)), dtype=bool)
    samples, iterations = len(task.train[1]), [0] * len(speeds)

    def watch(worker, seen):
        number, iterations[worker] = iterations[worker], iterations[worker] + 1
        for seed, of_seed in enumerate(seen):
            for run, (error, excess) in enumerate(of_seed):
                decision = watches[worker][seed][run]
                if np.isfinite(error + excess) and decision.due(number):
                    warned[seed, run] |= decision.observe(number, error, excess) is not None

    draws, last = np.random.default_rng(len(speeds)), [0] * len(speeds)
    for epoch in range(task.epochs):
        orders = np.stack([np.random.default_rng([seed, epoch]).permutation(samples) for seed in seeds])
        orders = torch.from_numpy(orders[:, : samples // task.batch * task.batch])
        if sync is None:
            for rows in orders.split(task.batch, dim=1):
                gradient, seen = task.push(stack.weights, rows, len(speeds))
                stack.step(gradient, stack.weights, "whole", lambda: [(dict(run), 1.0, 0.0) for run in runs])
                for worker, of_worker in enumerate(seen):
                    watch(worker, of_worker)
        else:
            for worker, seen in _epoch(task, stack, runs, speeds, sync.policy(), orders, draws, last):
                watch(worker, seen)
    return task.accuracy(stack.weights).numpy(), stack.weights.isfinite().all(-1).numpy(), warned, stack.weights


def _epoch(task, stack, runs, speeds, policy, orders, draws, last):
    """Train without a barrier, and yield each push's worker and logits; `last` is how stale those before were."""
    claims = list(orders.split(task.batch // len(speeds), dim=1))[::-1]
    queue, version, committed = [], 0, 0

    def obey(commands, now):
        for command in commands:
            if not isinstance(command, Release):
                continue
            worker = command.worker
            if not claims:
                obey(policy.on_leave(worker, now), now)
                continue
            rows = claims.pop()
            share, stale = rows.shape[1] / task.batch, last[worker]
            weights = stack.given(
                (stale, share),
                lambda s=share, k=stale: [rate_study._distance((rate_study.OURS, r), s, k) for r in runs],
            )
            ends = now + max(0.2, draws.normal(1.0, JITTER)) * rows.shape[1] / speeds[worker]
            heapq.heappush(queue, (ends, worker, weights, rows, version, committed))

    obey([command for worker in range(len(speeds)) for command in policy.on_join(worker, 0.0)], 0.0)
    for number in range(len(claims) + len(queue)):
        now, worker, weights, rows, pulled, before = heapq.heappop(queue)
        stale, batches, share = version - pulled, (committed - before) / task.batch, rows.shape[1] / task.batch
        gradient, (seen,) = task.push(weights, rows)
        stack.step(
            gradient, weights, (stale, batches, share),
            lambda s=share, b=batches, k=stale: [rate_study.OURS.step(run, s, b, k) for run in runs],
        )  # fmt: skip
        version, committed, last[worker] = version + 1, committed + rows.shape[1], stale
        yield worker, seen
        push = Push(worker, number, rows.shape[1], rows.shape[1], share, pulled)
        obey(policy.on_push(push, now), now)


def _study(task, seeds):
    """A row per run: its fate, and whether it was warned of."""
    rows = []
    for kind, options in KINDS.items():
        tuning = [{**options, "lr": rate} for rate in GRIDS[kind]]
        means = train(task, tuning, [1.0], [100, 101, 102], None)[0].mean(axis=0)
        best, tuned = GRIDS[kind][int(means.argmax())], float(means.max())
        runs = [{**options, "lr": best * times} for times in TIMES]
        for scheme, sync in SCHEMES.items():
            began = time.monotonic()
            accuracy, finite, warned, _ = train(task, runs, SPEEDS, seeds, sync)
            missing = (tuned - accuracy) / (tuned - task.guess)
            for (seed, run), part in np.ndenumerate(missing):
                fate = int(np.searchsorted((0.05, 0.5, 0.8), part)) if finite[seed, run] else 4
                rows.append({"task": task.name, "kind": kind, "scheme": scheme, "rate": best,
                             "times": TIMES[run], "seed": seeds[seed], "accuracy": float(accuracy[seed, run]),
                             "fate": FATES[fate], "warned": bool(warned[seed, run])})  # fmt: skip
            took = time.monotonic() - began
            record.console.print(f"  {task.name}, {kind}, {scheme}: {took:.0f} s")
    return rows


def _weak(samples=16_000):
    """Classes that the inputs say next to nothing of: the best accuracy is about 0.19 of ten."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples + 4000, 32, generator=generator)
    logits = torch.tanh(inputs @ (torch.randn(32, 10, generator=generator) / 32**0.5))
    truth = torch.multinomial(logits.softmax(dim=1), 1, generator=generator)[:, 0]
    return tasks.Task(name="weak", train=(inputs[:samples], truth[:samples]), test=(inputs[samples:], truth[samples:]),
                      hidden=32, classes=10, source="drawn")  # fmt: skip


def _tuned_finely():
    """Digits from weights that were trained on their other half."""
    whole = tasks.digits()
    halves = [
        dataclasses.replace(whole, train=tuple(p[part] for p in whole.train)) for part in (slice(600), slice(600, None))
    ]
    before = Task(halves[0], "", batch=40, epochs=30)
    weights = train(before, [{**KINDS["SGD momentum 0.9"], "lr": 0.2}], [1.0], [0], None)[3]
    return Task(halves[1], "digits, fine-tuned", batch=80, epochs=14, start=weights[0])


def main():
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    options = record.arguments(__doc__).parse_args()
    seeds = [FIRST_SEED + options.seed + number for number in range(1 if options.quick else SEEDS)]
    studied = [Task(tasks.digits(), "digits", batch=80, epochs=14)]
    if not options.quick:
        studied += [
            Task(tasks.letters(), "letters", batch=160, epochs=12),
            Task(tasks.digits(noise=0.5), "digits, half of the labels random", batch=80, epochs=14),
            _tuned_finely(),
            Task(_weak(), "weak", batch=80, epochs=1),
        ]
    rows = [row for task in studied for row in _study(task, seeds)]
    # Where there is next to nothing to learn, nothing can be lost.
    lost = [row for row in rows if row["fate"] == "lost" and row["task"] != "weak"]
    healthy = [row for row in rows if row["fate"] == "healthy"]
    counts = Counter((row["task"], row["fate"], row["times"], row["warned"]) for row in rows)
    done = record.publish(
        "divergence_study",
        "Runs on servers that are warned of as diverging, by what became of them",
        options,
        config={"speeds": SPEEDS, "schemes": list(SCHEMES), "optimizers": KINDS, "times_the_tuned_rate": TIMES,
                "seeds": seeds, "jitter": JITTER},
        figures=[
            record.figure("part of the lost runs that was warned of", [_part(lost)], goal=">= 0.95"),
            record.figure("part of the healthy runs that was warned of, up to the tuned rate",
                          [_part([row for row in healthy if row["times"] <= 1])], goal="<= 0"),
            record.figure("part of the healthy runs that was warned of, above it",
                          [_part([row for row in healthy if row["times"] > 1])], goal="<= 0.01"),
        ],
        tables=[
            record.table(
                f"{task.name}: warned of / runs, by times the tuned rate", ("fate", *map(str, TIMES)),
                [[fate, *(_cell(counts, task.name, fate, times) for times in TIMES)] for fate in FATES],
            )
            for task in studied
        ],
        raw=rows,
    )  # fmt: skip
    return 0 if done else 1


def _part(rows):
    return sum(row["warned"] for row in rows) / max(1, len(rows))


def _cell(counts, *case):
    warned, silent = counts[*case, True], counts[*case, False]
    return f"{warned} / {warned + silent}" if warned + silent else ""


if __name__ == "__main__":
    sys.exit(main())
