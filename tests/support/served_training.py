"""What the workers of runs on servers run in the tests; each function returns plain values."""

import math
import os
import warnings
from fractions import Fraction
from itertools import islice

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import evenstep
from support import own_optimizers, training
from support.ahead_habits import ahead
from support.guard import GUARD_SECONDS
from support.training import step, weights


def optimizer_of(run, model):
    """Several param groups: weights and biases, each with options of their own."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.01, "lr": 0.02},
    ]
    if run.optimizer == "adam":
        return torch.optim.Adam(groups, lr=0.01)
    if run.optimizer == "own":
        return own_optimizers.Signs(groups)
    if run.optimizer != "momentum":
        return getattr(torch.optim, run.optimizer)(groups)
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def prepared(run, optimizer=None):
    model = training.model_of(run)
    optimizer = optimizer_of(run, model)
    loader = DataLoader(
        TensorDataset(*training.data(run)), batch_size=run.batch_size, num_workers=run.num_workers, shuffle=True
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    model, optimizer, loader = evenstep.prepare(
        model, optimizer, loader, scheme=run.chosen_scheme(), seed=run.seed, **run.options
    )
    return model, optimizer, loader, scheduler


def train(run):
    """An ordinary loop with a scheduler by epoch: weights and positions of each epoch."""
    model, optimizer, loader, scheduler = prepared(run)
    ended, positions = [], []
    for _ in range(run.epochs):
        positions.append([])
        for inputs, targets in loader:
            step(model, optimizer, inputs, targets)
            if loader.synchronises:  # Once for all steps of a period.
                positions[-1].append(seen(loader))
        scheduler.step()
        ended.append(weights(model))
    return {"ended": ended, "positions": positions}


def train_in_periods(run):
    """An ordinary loop: the weights after each epoch, and by claim its epoch and the positions of each of its steps."""
    model, optimizer, loader = training.prepared(run)
    ended, claims = [], []
    for epoch in range(run.epochs):
        for inputs, targets in loader:
            if loader.newest.first:
                claims.append((epoch, []))
            claims[-1][1].append(list(loader.newest.positions[: loader.newest.samples]))
            step(model, optimizer, inputs, targets)
        ended.append(weights(model))
    return {"ended": ended, "claims": claims, "kept": len(optimizer.state)}


def train_more_later(run, late):
    """What is said where the last layer is trained from the second epoch on only."""
    model = training.model_of(run)
    last = list(model[2].requires_grad_(False).parameters())
    given = model[0] if late == "adds a group" else model
    optimizer = torch.optim.SGD(given.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(*training.data(run)), batch_size=run.batch_size)
    prepared, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme=run.scheme)
    for epoch in range(2):
        if epoch:
            model[2].requires_grad_(True)
        if epoch and given is not model:
            optimizer.add_param_group({"params": last})
        try:
            for inputs, targets in loader:
                step(prepared, optimizer, inputs, targets)
        except evenstep.ConfigError as error:
            return str(error)


LARGE = 200_000


def train_a_large_model(run):
    """Train this many parameters."""
    inputs = torch.randn(run.samples, LARGE // 4)
    model = torch.nn.Linear(LARGE // 4, 4, bias=False)
    loader = DataLoader(TensorDataset(inputs), batch_size=run.batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme=run.scheme)
    for (inputs,) in loader:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def train_in_periods_ahead(run):
    """The same weights of a loop that fetches each batch before the step on the one before."""
    model, optimizer, loader = training.prepared(run)
    ended = []
    for _ in range(run.epochs):
        for batch in ahead(loader, 2):
            step(model, optimizer, *batch)
        ended.append(weights(model))
    return {"ended": ended}


def break_and_spoil_a_period(run, barrier):
    """Worker 1 leaves the first epoch in a period, and in the second a loss of its is NaN; each epoch has both."""
    model, optimizer, loader = training.prepared(run)
    ended, victim = [], os.environ["RANK"] == "1"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(run.epochs):
            for number, (inputs, targets) in enumerate(loader):
                if not number:
                    barrier.wait(GUARD_SECONDS)
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                (loss * math.nan if (victim, epoch, number) == (True, 1, 1) else loss).backward()
                optimizer.step()
                if (victim, epoch, number) == (True, 0, 1):
                    break
            ended.append(weights(model))
    return {"ended": ended, "skipped": loader.statistics().skipped, "warned": [str(each.message) for each in caught]}


class ServersAlone:
    """The weights of servers after each push, written out; and their momentum, and the samples so far."""

    def __init__(self, initial, outer, global_batch_size):
        self.versions, self.momenta, self.samples = [initial], [torch.zeros_like(initial)], [0]
        self.outer, self.whole = outer, global_batch_size
        self.new, self.part = torch.zeros_like(initial), Fraction(0)

    def push(self, change, samples, pulled, had, rate, *, of=None):
        """Step along this change from the weights that a worker `had`; how far its next ones are moved along momentum.

        Without an `outer` optimizer it is a gradient, on which SGD steps at this rate. It counts for its part `of` so
        many samples, a global batch by default.
        """
        share, ahead, weights = samples / (of or self.whole), 0.0, self.versions[-1]
        self.part += Fraction(samples, of or self.whole)
        if self.outer is None:
            # As torch steps, since the last bit decides which of two numbers of the wire is nearest.
            stepped = torch.nn.Parameter(weights.clone())
            stepped.grad = change
            torch.optim.SGD([stepped], lr=rate, fused=True).step()
            self.versions.append(stepped.detach())
        elif self.outer.momentum and not self.outer.delayed:
            ahead = self._nesterov(change, share, pulled, had)
        else:
            self._delayed(share * change)
        self.samples.append(self.samples[-1] + samples)
        return ahead

    def _delayed(self, change):
        self.new, moved = self.new + change, change
        momentum = self.momenta[-1]
        if self.part >= 1:
            self.part -= 1
            momentum, self.new = self.outer.momentum * momentum + self.new, torch.zeros_like(change)
            moved = torch.add(change, momentum, alpha=self.outer.momentum)
        self.momenta.append(momentum)
        self.versions.append(torch.sub(self.versions[-1], moved, alpha=self.outer.rate))

    def _nesterov(self, change, share, pulled, had):
        """The step of `asp` with momentum, and its look ahead (docs/schemes/asp.md)."""
        beta, weights, missed = self.outer.momentum, self.versions[-1], len(self.versions) - 1 - pulled
        behind = (self.samples[-1] - self.samples[pulled]) / self.whole
        moved = share / (1 + beta * behind) * (change + 3 * change.abs() * (weights - had) * bool(missed))
        self.momenta.append(beta**share * self.momenta[-1] + moved)
        along = beta * (1 - beta**share) / (1 - beta) * self.momenta[-1]
        self.versions.append(weights - self.outer.rate * (moved + along))
        gone = beta * (1 - beta**behind) / (1 - beta) * beta ** (behind / missed) if missed else 0.0
        return self.outer.rate * gone


def train_in_periods_alone(
    run, claims, pushes, outer, global_batch_size, wire="float32", begun=None, resumed=None, groups=None
):
    """The same in one process: asynchronous local SGD (arXiv 2401.09135) with the momentum of `outer`, if any.

    `claims` of each worker, as `train_in_periods` returns them; `pushes` are the worker and the version that it pulled
    of each push, in the order of their arrival. Without an `outer` optimizer a push is a gradient, on which SGD steps.
    On a narrow `wire` each push is rounded, and so is what takes a worker's weights to those that it pulls in an epoch;
    `begun` has the version at which a worker began an epoch. `resumed`: the epoch before which the run was started
    again, so that what rounding had left is lost. `groups`: the workers in the group of each push, which push as one;
    a group of all workers counts for a global batch. Returns the weights after the last push.
    """
    inputs, targets = training.data(run)
    models = [training.model_of(run) for _ in claims]
    optimizers = [training.optimizer_of(run, model) for model in models]
    servers = ServersAlone(torch.tensor(weights(models[0]), dtype=run.dtype), outer, global_batch_size)
    versions, left = servers.versions, [iter(own) for own in claims]
    ends = [sum(number < epoch for own in claims for number, _ in own) for epoch in range(run.epochs)]
    has, rest, epochs = [None] * len(claims), [torch.zeros(len(versions[0]))] * len(claims), [0] * len(claims)
    ahead, gathered = [0.0] * len(claims), {}
    # A group is released on the same weights, so these tell which of its pushes are one.
    keys = [*zip(groups, pushes, strict=True)] if groups else [*enumerate(pushes)]
    keys = [(group, pulled) for group, (_, pulled) in keys]
    for number, (worker, pulled) in enumerate(pushes):
        model, optimizer = models[worker], optimizers[worker]
        epoch, steps = next(left[worker])
        if epoch > epochs[worker]:
            # An epoch ends with the weights as they are; one that the others have finished is over at once.
            ahead[worker], epochs[worker] = 0.0, epoch
            has[worker] = None if wire == "float32" else versions[max(ends[epoch], begun[worker, epoch - 1])]
            rest[worker] = rest[worker] * (epoch != resumed)
        given = versions[pulled] - ahead[worker] * servers.momenta[pulled] if ahead[worker] else versions[pulled]
        if has[worker] is None or wire == "float32":
            has[worker] = given
        else:
            has[worker] = has[worker] + on_wire((given - has[worker]).float(), wire)
        torch.nn.utils.vector_to_parameters(has[worker].clone(), model.parameters())
        order = training.epoch_order(run, epoch)
        for positions in steps:
            step(model, optimizer, inputs[order[positions]], targets[order[positions]])
        change = has[worker] - torch.tensor(weights(model), dtype=run.dtype)
        if outer is None:
            change = torch.cat([each.grad.flatten() for each in model.parameters()])
        sent = change
        if wire != "float32":  # Where the arithmetic is in float32.
            sent = on_wire(change.float() + rest[worker], wire)
            rest[worker] = change.float() + rest[worker] - sent
        count, rate = sum(map(len, steps)), optimizer.param_groups[0]["lr"]
        parts = gathered.setdefault(keys[number], [])
        parts.append((sent.to(run.dtype), count))
        if keys[number] in keys[number + 1 :]:
            continue
        group, whole = groups[number] if groups else (worker,), sum(count for _, count in parts)
        mean = sum(sent * (count / whole) for sent, count in parts)
        of = whole if groups and len(group) == len(claims) else None
        moved = servers.push(mean, whole, pulled, has[worker], rate, of=of)
        ahead = [moved if each in group else before for each, before in enumerate(ahead)]
    assert not any(list(own) for own in left)
    return versions[-1].tolist()


def on_wire(values, wire):
    """The vector of float32 as it arrives: in bfloat16, or in whole 127ths of the largest magnitude of 256 values."""
    if wire == "bf16":
        return values.bfloat16().float()
    parts = []
    for part in torch.split(values, 256):
        scale = part.abs().max() / 127
        parts.append((part * (1 / scale)).round() * scale if scale else part)
    return torch.cat(parts)


def seen(loader):
    """The positions in hand that count."""
    return list(loader.current.positions[: loader.current.samples])


def train_alone(run, global_batch_size):
    """The same mathematics in one process, in plain torch: the weights after each epoch."""
    model = training.model_of(run)
    optimizer = optimizer_of(run, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    inputs, targets = training.data(run)
    ended = []
    for epoch in range(run.epochs):
        order = training.epoch_order(run, epoch)
        for start in range(0, run.samples, global_batch_size):
            part = order[start : start + global_batch_size]
            step(model, optimizer, inputs[part], targets[part])
        scheduler.step()
        ended.append(weights(model))
    return ended


def leave_evaluate_and_schedule(scheme=None):
    """As scripts do: loops left where a period has ended, evaluation with gradients, a schedule over the batches."""
    run = training.Run(samples=80)  # 16 batches.
    model, loader = training.model_of(run), DataLoader(TensorDataset(*training.data(run)), batch_size=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if scheme is not None:
        model, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme=scheme)
    batches = len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=2 * batches)
    for end in (4, batches):
        for inputs, targets in islice(loader, end):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
            model(inputs[:1])
    return [weights(model), batches]


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.ones(8, 2)


def train_on_a_stream(scheme):
    """What is said of it."""
    model = torch.nn.Linear(2, 1)
    optimizer, loader = torch.optim.SGD(model.parameters()), DataLoader(Stream())
    try:
        next(iter(evenstep.prepare(model, optimizer, loader, scheme=scheme)[2]))
    except evenstep.ConfigError as error:
        return str(error)


def step_by_hand(scheme):
    """What is warned of where the script changes the weights itself."""
    run = training.Run(samples=40)
    model, loader = training.model_of(run), DataLoader(TensorDataset(*training.data(run)), batch_size=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme=scheme)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for inputs, targets in loader:
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.05 * parameter.grad
    return [str(each.message) for each in warned]
