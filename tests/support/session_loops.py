"""Loops over what a session hands out: shares for batches of the script's own, and several loaders.

A loop is a function of a `Run` and of a session, which is `PlainSession` in one process without evenstep.
"""

from dataclasses import replace
from itertools import count, islice

import numpy as np
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import evenstep
from support import training
from support.ahead_habits import ahead
from support.habits import GLOBAL_BATCH, PlainModel
from support.training import weights


class PlainSession:
    """What a session is to a script, in one process."""

    def __init__(self, run):
        self.run = run

    def model(self, model):
        return PlainModel(model)

    def optimizer(self, optimizer):
        return optimizer

    def shares(self, length, global_batch_size):
        return PlainShares(length, global_batch_size)

    def loader(self, loader):
        return PlainBatches(replace(self.run, samples=len(loader.dataset)), loader)


class PlainShare:
    def __init__(self, positions):
        self.positions = np.array(positions)
        self.samples = len(positions)


class PlainShares:
    def __init__(self, length, size):
        self.length, self.size = length, size

    def __iter__(self):
        starts = count(0, self.size) if self.length is None else range(0, self.length, self.size)
        for start in starts:
            stop = start + self.size
            yield PlainShare(range(start, stop if self.length is None else min(stop, self.length)))

    def computes(self, share):
        """There is nobody else."""


class PlainBatches:
    """The loader's global batches in the documented order, of three workers."""

    def __init__(self, run, loader):
        self.run, self.dataset, self.size = run, loader.dataset, 3 * loader.batch_size
        self.epoch = self.start = 0

    def __iter__(self):
        epoch, start = self.epoch, self.start
        self.start = 0
        for number, part in enumerate(training.epoch_order(self.run, epoch).split(self.size)[start:]):
            if number:  # A look at the first batch consumes no epoch.
                self.epoch = epoch + 1
            yield [tensor[part] for tensor in self.dataset.tensors]

    def set_epoch(self, epoch):
        self.epoch = epoch

    def start_at(self, iteration):
        self.start = iteration

    def weigh_by(self, count):
        """There is nobody else."""

    def settle(self):
        """There is nobody else."""


BUILT = []
"""The model of the last loop, and the weights with which it began."""


def prepared(run, session, model=None):
    model = training.model_of(run) if model is None else model
    BUILT[:] = [(model, weights(model))]
    return session.model(model), session.optimizer(training.optimizer_of(run, model))


def chosen(run, share):
    """The rows of a share, in an epoch of any length."""
    inputs, targets = training.data(run)
    rows = share.positions % run.samples
    return inputs[rows], targets[rows]


# Shares.


def make_batches(run, session):
    model, optimizer = prepared(run, session)
    shares = session.shares(run.samples, GLOBAL_BATCH)
    for _ in range(run.epochs):
        for share in shares:
            training.step(model, optimizer, *chosen(run, share))
    return weights(model)


def never_end(run, session):
    """nanoGPT's loop: a window of two batches a step, the next batch between forward and backward, without an end."""
    model, optimizer = prepared(run, session)
    shares = iter(session.shares(None, GLOBAL_BATCH))
    inputs, targets = chosen(run, next(shares))
    for _ in range(7):
        for micro_step in range(2):
            model.require_backward_grad_sync = micro_step == 1
            loss = mse_loss(model(inputs), targets) / 2
            inputs, targets = chosen(run, next(shares))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def make_batches_ahead(run, session):
    model, optimizer = prepared(run, session)
    shares = session.shares(run.samples, GLOBAL_BATCH)
    for _ in range(run.epochs):
        for batch in ahead((chosen(run, share) for share in shares), 3):
            training.step(model, optimizer, *batch)
    return weights(model)


class Packed(torch.nn.Module):
    """Takes a batch as one long row, which does not show how many samples it has."""

    def __init__(self, run):
        super().__init__()
        self.inner = training.model_of(run)

    def forward(self, inputs):
        return self.inner(inputs.view(-1, training.FEATURES))


def pack_ahead(run, session, tell=True):
    model, optimizer = prepared(run, session, Packed(run))
    shares = session.shares(run.samples, GLOBAL_BATCH)
    for _ in range(run.epochs):
        for share in ahead(shares, 3):
            inputs, targets = chosen(run, share)
            if tell:
                shares.computes(share)
            training.step(model, optimizer, inputs.flatten(), targets)
    return weights(model)


def pack_ahead_and_tell_nothing(run, session):
    return pack_ahead(run, session, tell=False)


# Several loaders.


def loaders(run, session, second, second_size=None):
    """A loader over the run's data, and one over other data."""
    data = TensorDataset(*training.data(run))
    others = TensorDataset(*(tensor[:second].flip(0) for tensor in training.data(replace(run, samples=second))))
    given = (
        DataLoader(data, batch_size=run.batch_size, shuffle=True),
        DataLoader(others, batch_size=second_size or run.batch_size, shuffle=True),
    )
    return [session.loader(each) for each in given]


def train_in_turn(run, session, second=40, second_size=3):
    """A warm-up, then the two by turns."""
    model, optimizer = prepared(run, session)
    one, other = loaders(run, session, second, second_size)
    for loader in (one, one, other, one, other):
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
    return weights(model)


def train_in_turn_alike(run, session):
    return train_in_turn(run, session, second=run.samples, second_size=run.batch_size)


def give_another_later(run, session):
    model, optimizer = prepared(run, session)
    one = session.loader(DataLoader(TensorDataset(*training.data(run)), batch_size=run.batch_size, shuffle=True))
    for inputs, targets in one:
        training.step(model, optimizer, inputs, targets)
    other = session.loader(DataLoader(TensorDataset(*training.data(run)), batch_size=run.batch_size, shuffle=True))
    other.set_epoch(3)
    for inputs, targets in other:
        training.step(model, optimizer, inputs, targets)
    return weights(model)


def take_one_of_each(run, session, second=None, second_size=None):
    """One step on a batch of each; the sum of the losses has one backward."""
    model, optimizer = prepared(run, session)
    one, other = loaders(run, session, second or run.samples, second_size)
    for _ in range(run.epochs):
        for (inputs, targets), (others, labels) in zip(one, other, strict=False):
            loss = mse_loss(model(inputs), targets) + mse_loss(model(others), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model)


def take_one_of_each_unlike(run, session):
    return take_one_of_each(run, session, second_size=3)


def take_one_of_each_in_two_backwards(run, session):
    """Of unlike sizes, and the shorter one begins again whenever it has ended."""
    model, optimizer = prepared(run, session)
    one, other = loaders(run, session, 40, 3)
    cycled = iter(other)
    for _ in range(run.epochs):
        for inputs, targets in one:
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            batch = next(cycled, None)
            if batch is None:
                cycled = iter(other)
                batch = next(cycled)
            mse_loss(model(batch[0]), batch[1]).backward()
            optimizer.step()
    return weights(model)


def weigh_each_by_units(run, session, before=False):
    """A mean over some of the targets, of a batch of each loader."""
    model, optimizer = prepared(run, session)
    given = loaders(run, session, 40, 3)
    for pair in zip(*given, strict=False):
        optimizer.zero_grad()
        for loader, (inputs, targets) in zip(given, pair, strict=True):
            counted = targets > 0
            if before:
                given[1].weigh_by(int(counted.sum()))
            errors = (model(inputs) - targets)[counted]
            loader.weigh_by(len(errors))
            ((errors**2).sum() / max(len(errors), 1)).backward()
        optimizer.step()
    return weights(model)


def weigh_the_second_before_the_first(run, session):
    return weigh_each_by_units(run, session, before=True)


def loop_in_another_order(run, session):
    """Worker 2 begins with the second loader."""
    model, optimizer = prepared(run, session)
    given = loaders(run, session, run.samples)
    for loader in given[::-1] if torch.distributed.get_rank() == 2 else given:
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)


# Epochs.


def leave_before_computing(run, session):
    """`if i == 3: break` before the batch is computed: the epoch was begun, and the next loop is the next one."""
    model, optimizer = prepared(run, session)
    (one, _) = loaders(run, session, run.samples)
    for _ in range(run.epochs):
        for number, (inputs, targets) in enumerate(one):
            if number == 3:
                break
            training.step(model, optimizer, inputs, targets)
    return weights(model)


def set_the_epoch_and_look(run, session):
    """`set_epoch` before the workers have met, and back to 0 after a look at another epoch."""
    model, optimizer = prepared(run, session)
    (one, other) = loaders(run, session, run.samples)
    one.set_epoch(2)
    for inputs, targets in one:
        training.step(model, optimizer, inputs, targets)
    one.set_epoch(4)
    next(iter(one))
    one.set_epoch(0)
    for inputs, targets in one:
        training.step(model, optimizer, inputs, targets)
    for _ in other:
        break
    for inputs, targets in other:
        training.step(model, optimizer, inputs, targets)
    other.set_epoch(0)
    for inputs, targets in islice(other, 2):
        training.step(model, optimizer, inputs, targets)
    other.settle()
    return weights(model)


def start_within_an_epoch(run, session):
    """Before the workers have met, after an epoch, and after a loop that was left."""
    model, optimizer = prepared(run, session)
    one, _ = loaders(run, session, run.samples)
    for epoch, start, steps in ((1, 2, 9), (0, 3, 1), (0, 4, 9), (2, 0, 9)):
        one.set_epoch(epoch)
        one.start_at(start)
        for inputs, targets in islice(one, steps):
            training.step(model, optimizer, inputs, targets)
            if isinstance(session, evenstep.Session):
                assert one.newest.ends_epoch == (one.newest.iteration == len(one) - 1)
    one.settle()
    return weights(model)


def set_the_samplers_epoch(run, session):
    """As a DDP script does, before the workers have met."""
    model, optimizer = prepared(run, session)
    data = TensorDataset(*training.data(run))
    workers = 3 if isinstance(session, evenstep.Session) else 1
    sampler = DistributedSampler(data, num_replicas=workers, rank=0, seed=run.seed)
    loader = session.loader(DataLoader(data, batch_size=run.batch_size, sampler=sampler))
    for epoch in (3, 1):
        sampler.set_epoch(epoch)
        if workers == 1:
            loader.set_epoch(epoch)
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
    return weights(model)


EXACT = (
    make_batches,
    make_batches_ahead,
    never_end,
    pack_ahead,
    train_in_turn,
    give_another_later,
    take_one_of_each,
    take_one_of_each_in_two_backwards,
    weigh_each_by_units,
    leave_before_computing,
    set_the_epoch_and_look,
    start_within_an_epoch,
    set_the_samplers_epoch,
)


def alone(loop, run):
    """What a loop comes to in one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return loop(run, PlainSession(run))
    finally:
        torch.set_num_threads(threads)


def attempt(loop, run, options):
    """What a loop comes to with evenstep; an error is text."""
    with evenstep.Session(seed=run.seed, timeout=20.0, **options) as session:
        try:
            return loop(run, session)
        except evenstep.EvenstepError as error:
            return f"{type(error).__name__}: {error}"


def together(cases, schemes):
    """By scheme and loop, what it comes to on this worker."""
    return {(scheme, loop.__name__): attempt(loop, run, schemes[scheme]) for scheme, loop, run in cases}


# What is saved, and what goes wrong.


def whole(run, session):
    model, optimizer = prepared(run, session)
    one, other = loaders(run, session, 40, 3)
    for loader in (one, other, one, other):
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
    shares = session.shares(run.samples, GLOBAL_BATCH)
    for _ in range(2):
        for share in shares:
            training.step(model, optimizer, *chosen(run, share))
    return weights(model)


def in_pieces(run, options):
    """As `whole`, in three sessions, each of which goes on from the state of the last."""
    model = training.model_of(run)
    optimizer = training.optimizer_of(run, model)
    state = None
    for piece in range(3):
        with evenstep.Session(seed=run.seed, timeout=20.0, **options) as session:
            ours, stepped = session.model(model), session.optimizer(optimizer)
            one, other = loaders(run, session, 40, 3)
            shares = session.shares(run.samples, GLOBAL_BATCH)
            if state is not None:
                session.load_state_dict(state)
            plan = [(one, other), (other, one, other, shares), (shares, shares)][piece]
            for number, loader in enumerate(plan):
                for batch in loader:
                    training.step(ours, stepped, *(chosen(run, batch) if loader is shares else batch))
                    if piece < 2 and number == len(plan) - 1 and loader.current.iteration == 1:
                        break
                loader.settle()
            state = session.state_dict()
    return weights(model), len(state["loaders"])


def mistakes(run, options, loops):
    """What is said of each loop that cannot work, and whether the weights are still those of the beginning."""
    found = {}
    for loop in loops:
        said = attempt(loop, run, options)
        ((model, before),) = BUILT
        found[loop.__name__] = said, weights(model) == before
    return found


def positions(run, options):
    """The positions that this worker computes, by epoch."""
    with evenstep.Session(seed=run.seed, timeout=20.0, **options) as session:
        model, optimizer = prepared(run, session)
        shares, found = session.shares(run.samples, GLOBAL_BATCH), []
        for _ in range(run.epochs):
            found.append([])
            for share in shares:
                training.step(model, optimizer, *chosen(run, share))
                found[-1] += share.positions[: share.samples].tolist()
        return found


def some_of_endless(run, options, steps):
    """The positions that this worker computes in so many steps."""
    with evenstep.Session(seed=run.seed, timeout=20.0, **options) as session:
        model, optimizer = prepared(run, session)
        found = []
        for share in islice(session.shares(None, GLOBAL_BATCH), steps):
            training.step(model, optimizer, *chosen(run, share))
            found += share.positions.tolist()
        return found
