"""Trains the runs of a stacked task by the events of a schedule, with the very update rule of the servers.

One process plays all workers and the server: a gradient is computed on the weights that its worker was given, and
counts when the schedule says.
"""

import copy

import numpy as np
import torch

from evenstep.core.sync.rate import commit_step, look_ahead
from harness.schedule import Committed, Given, iterations


class Optimizer:
    """SGD or Adam with one learning rate per run, which takes commits as a server's does; options as torch names them.

    Tensors are replaced and never changed in place, so that a copy of an optimizer goes its own way.
    """

    def __init__(self, rates, **options):
        self.rates = torch.tensor(rates)[:, None]
        self.options = {"lr": 1.0, **options}
        self.buffer = self.square = None
        self.steps = 0

    def given(self, weights, event):
        """The weights that a worker gets: ahead along the momentum after a stale push."""
        if self.buffer is None or not event.stale:
            return weights
        share = event.behind / event.stale
        options = commit_step(self.options, share=share, behind=event.behind).options
        distance = look_ahead(options, event.stale)
        return weights - distance * self.rates * self._direction(options) if distance else weights

    def commit(self, weights, gradient, computed_on, event):
        """The weights after this commit."""
        step = commit_step(self.options, share=event.share, behind=event.behind, commits=event.stale)
        if step.compensation:
            gradient = gradient + step.compensation * gradient.abs() * (weights - computed_on)
        gradient = step.gradient_factor * gradient
        if step.direct:
            weights = weights - step.direct * self.rates * gradient
        return weights - step.options["lr"] * self.rates * self._stepped(gradient, step.options)

    def _stepped(self, gradient, options):
        """The step at a rate of 1, after the memory has taken the gradient in."""
        self.steps += 1
        if "betas" in options:
            beta1, beta2 = options["betas"]
            first = torch.zeros_like(gradient)
            self.buffer = (first if self.buffer is None else beta1 * self.buffer) + (1 - beta1) * gradient
            self.square = (first if self.square is None else beta2 * self.square) + (1 - beta2) * gradient.square()
            return self._direction(options)
        if not options["momentum"]:
            return gradient
        self.buffer = gradient if self.buffer is None else options["momentum"] * self.buffer + gradient
        return gradient + options["momentum"] * self.buffer if options["nesterov"] else self.buffer

    def _direction(self, options):
        if "betas" not in options:
            return self.buffer
        of_mean, of_square = (1 - beta**self.steps for beta in options["betas"])
        return self.buffer / of_mean / ((self.square / of_square).sqrt() + 1e-8)


def sgd(rates, momentum=0.0, *, nesterov=False):
    """torch's SGD."""
    return Optimizer(rates, momentum=momentum, nesterov=nesterov, dampening=0.0)


def adam(rates):
    """torch's Adam."""
    return Optimizer(rates, betas=(0.9, 0.999))


class Together:
    """Several optimizers, each with some of the runs of a stack."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        self.counts = [len(each.rates) for each in optimizers]

    def given(self, weights, event):
        parts = zip(self.optimizers, weights.split(self.counts), strict=True)
        return torch.cat([optimizer.given(part, event) for optimizer, part in parts])

    def commit(self, weights, gradient, computed_on, event):
        of_each = [each.split(self.counts) for each in (weights, gradient, computed_on)]
        return torch.cat(
            [
                optimizer.commit(*parts, event)
                for optimizer, *parts in zip(self.optimizers, *of_each, strict=True)
            ]
        )  # fmt: skip

    def __copy__(self):
        return Together([copy.copy(each) for each in self.optimizers])

    @classmethod
    def mean(cls, several):
        """The optimizer whose memory is the mean of theirs."""
        whole = copy.copy(several[0])
        for parts in zip(*(each.optimizers for each in (whole, *several)), strict=True):
            for name in ("buffer", "square"):
                if getattr(parts[0], name) is not None:
                    setattr(parts[0], name, torch.stack([getattr(part, name) for part in parts[1:]]).mean(dim=0))
        return whole


class Order:
    """The order in which a seed goes through the rows of a task, again and again."""

    def __init__(self, rows, seed):
        self.rows, self.random = rows, np.random.default_rng([seed, 1])
        self.left = np.zeros(0, dtype=np.int64)

    def take(self, count):
        while len(self.left) < count:
            self.left = np.concatenate([self.left, self.random.permutation(self.rows)])
        taken, self.left = self.left[:count], self.left[count:]
        return torch.from_numpy(taken)


def train(task, events, optimizers, seed, every):
    """What is measured of each run after each so many global batches: a list of (number of the event, values)."""
    update, order = Together(optimizers), Order(len(task.train[1]), seed)
    weights = task.first(seed).expand(sum(update.counts), -1).contiguous()
    under_way, curve, done = {}, [], 0.0
    for number, event in enumerate(events):
        if isinstance(event, Given):
            under_way[event.worker] = update.given(weights, event), order.take(event.samples)
            continue
        # The workers of one commit have had the same weights, so it is one gradient, of all their samples.
        (computed_on, *_), rows = zip(*(under_way.pop(worker) for worker in event.workers), strict=True)
        weights = update.commit(weights, task.gradient(computed_on, torch.cat(rows)), computed_on, event)
        done += event.share
        if done >= (len(curve) + 1) * every - 1e-6:
            curve.append((number, task.tested(weights)))
    return curve


def train_locally(task, scenario, size, optimizers, seed):
    """Local SGD with equal sizes: a list of (seconds, values) after each average."""
    update, order = Together(optimizers), Order(len(task.train[1]), seed)
    weights = task.first(seed).expand(sum(update.counts), -1).contiguous()
    curve, now, alone = [], 0.0, Committed(0.0, ())
    for meeting in zip(*iterations(scenario), strict=True):
        ended = []
        for worker in meeting:
            own, theirs = copy.copy(update), weights
            for _ in range(worker.samples // size):
                theirs = own.commit(theirs, task.gradient(theirs, order.take(size)), theirs, alone)
            ended.append((theirs, own))
        weights = torch.stack([theirs for theirs, _ in ended]).mean(dim=0)
        update = Together.mean([own for _, own in ended])
        now += meeting[0].iteration_seconds
        curve.append((now, task.tested(weights)))
    return curve
