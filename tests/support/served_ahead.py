"""Scripts that fetch batches before they have computed the last one, for the workers of runs on servers."""

import os
import signal
import time
import warnings
from itertools import islice

from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from support import served_training
from support.ahead_habits import ahead
from support.habits import ordinary
from support.training import step, weights


def _epochs(run, train):
    """The positions that each epoch's loop trained on, in order, and the weights after each."""
    model, optimizer, loader, _ = served_training.prepared(run)
    positions, ended = [], [weights(model)]
    for _ in range(run.epochs):
        positions.append([])
        train(model, optimizer, loader, lambda: positions[-1].append(served_training.seen(loader)))
        ended.append(weights(model))
    return {"positions": positions, "ended": ended}


def prefetch(run, depth=2, skips=()):
    """`depth` batches are fetched before the first is computed; of each epoch, those in `skips` are not computed."""

    def train(model, optimizer, loader, seen):
        for number, batch in enumerate(ahead(loader, depth)):
            if number not in skips:
                step(model, optimizer, *batch)
                seen()

    return _epochs(run, train)


def prefetch_three(run):
    return prefetch(run, depth=4)


def look_and_leave_the_last(run):
    """A pass is looked at; then the last batch of each epoch, which was fetched ahead, is not computed."""

    def train(model, optimizer, loader, seen):
        if loader.iteration == 0:
            assert len(list(loader)) > loader.epoch == 0
        stream = iter(loader)
        batch, following = next(stream, None), next(stream, None)
        while following is not None:
            step(model, optimizer, *batch)
            seen()
            batch, following = following, next(stream, None)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = _epochs(run, train)
    return {**found, "warned": [str(each.message) for each in caught]}


def prefetch_and_skip(run):
    return prefetch(run, skips=(0, 3))


def fetch_between_forward_and_backward(run):
    def train(model, optimizer, loader, seen):
        stream = iter(loader)
        batch = next(stream, None)
        while batch is not None:
            loss = mse_loss(model(batch[0]), batch[1])
            seen()
            batch = next(stream, None)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return _epochs(run, train)


def fetch_between_backward_and_step(run):
    def train(model, optimizer, loader, seen):
        stream = iter(loader)
        batch = next(stream, None)
        while batch is not None:
            mse_loss(model(batch[0]), batch[1]).backward()
            seen()
            batch = next(stream, None)
            optimizer.step()
            optimizer.zero_grad()

    return _epochs(run, train)


def accumulate_windows(run):
    """As the Hugging Face Trainer: windows of three batches, which are fetched up front."""

    def train(model, optimizer, loader, seen):
        stream = iter(loader)
        while window := list(islice(stream, 3)):
            for inputs, targets in window:
                loader.weigh_by(2 * len(inputs))
                (mse_loss(model(inputs), targets) / len(window)).backward()
                seen()
            optimizer.step()
            optimizer.zero_grad()

    return _epochs(run, train)


def accumulate(run):
    """Windows of three batches, which are fetched one by one; the last one of an epoch is not stepped on."""

    def train(model, optimizer, loader, seen):
        for number, (inputs, targets) in enumerate(loader, start=1):
            mse_loss(model(inputs), targets).backward()
            seen()
            if number % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()

    return _epochs(run, train)


def skip_at_first(run):
    """A loop that does not fetch ahead, and leaves its first two batches out."""
    return prefetch(run, depth=1, skips=(0, 1))


def take_long(run, seconds, early):
    """Every third batch takes so long, and the next one is fetched before the forward pass or after the backward."""

    def train(model, optimizer, loader, seen):
        for number, (inputs, targets) in enumerate(ahead(loader, 2) if early else loader):
            loss = mse_loss(model(inputs), targets)
            until = time.perf_counter() + (0 if number % 3 else seconds)
            while time.perf_counter() < until:
                pass
            loss.backward()
            if early:
                optimizer.step()
                optimizer.zero_grad()
            seen()

    def late(model, optimizer, loader, seen):
        def stepping():
            for number, batch in enumerate(loader):
                if number:
                    optimizer.step()
                    optimizer.zero_grad()
                yield batch
            optimizer.step()
            optimizer.zero_grad()

        train(model, optimizer, stepping(), lambda: None)

    return _epochs(run, train if early else late)


def prefetch_and_die(run, victim):
    """The victim is killed while it holds two batches."""

    def train(model, optimizer, loader, seen):
        for number, batch in enumerate(ahead(loader, 2)):
            if number == 2 and int(os.environ["RANK"]) == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            step(model, optimizer, *batch)
            seen()

    return _epochs(run, train)


def be_given_up(loader):
    """This worker joins again, as if it had been restarted."""
    link = loader.engine._link
    link.incarnation = -1
    for shard in link.shards:
        shard.close()


def prefetch_and_be_given_up(run, victim):
    """The victim holds two batches when it is given up."""

    def train(model, optimizer, loader, seen):
        for number, batch in enumerate(ahead(loader, 2)):
            if number == 2 and int(os.environ["RANK"]) == victim:
                be_given_up(loader)
            step(model, optimizer, *batch)
            seen()

    return _epochs(run, train)


def accumulate_and_be_given_up(run, prepare):
    """Windows of two batches. On servers the first batch is forfeited after its backward, and claimed again."""
    model, optimizer, loader = ordinary(run, prepare)
    served = isinstance(model, DistributedDataParallel)
    for number, (inputs, targets) in enumerate(loader):
        (mse_loss(model(inputs), targets) / 2).backward()
        if served and not number:
            be_given_up(loader)
        if number % 2 == served:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)
