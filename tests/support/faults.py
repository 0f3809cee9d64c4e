"""What worker processes run in which one of them meets a fault, each in a group of its own."""

import os
import signal
import sys
import threading

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from support import training
from support.ports import free_port
from support.processes import run_workers


class Hangable(Dataset):
    """A dataset that waits for ever once `hangs` is set, as on a file system that does not answer."""

    def __init__(self, run):
        self.inputs, self.targets = training.data(run)
        self.hangs = False

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        if self.hangs:
            threading.Event().wait()
        return self.inputs[index], self.targets[index]


def train_and_hang(run, victim, moment, iteration):
    """Worker `victim` does not come back from something of its script's, at that moment after so many iterations."""
    mine = dist.get_rank() == victim
    if mine and moment == "before prepare":
        threading.Event().wait()
    dataset = Hangable(run)
    model, optimizer, loader = training.prepared(run, dataset=dataset)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            now = mine and loader.iteration == iteration
            loss = training.torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            if now and moment == "before the step":
                threading.Event().wait()
            optimizer.step()
            if now and moment == "after the step":
                threading.Event().wait()
            dataset.hangs = now and moment == "in the dataset"
        if mine and moment == "after the loop":
            threading.Event().wait()
    return "finished"


class Deadly(Hangable):
    """A dataset that kills the process that asks for its length."""

    def __len__(self):
        os.kill(os.getpid(), signal.SIGKILL)


def die_in_prepare(run, victim):
    """Worker `victim` dies in `prepare`, where the others wait for what it was given."""
    dataset = (Deadly if dist.get_rank() == victim else Hangable)(run)
    training.prepared(run, dataset=dataset, shuffle=False)


def die_in_the_second_batch(run, victim, own):
    """The others reorder the buckets of gradients by then, in DistributedDataParallel's forward; what they report.

    `own`: of a wrapper of the script's own, whose errors are seen where they end the process.
    """
    shown = []
    sys.excepthook = lambda kind, error, traceback: shown.append((kind.__name__, str(error), repr(error.__cause__)))
    model = DistributedDataParallel(training.model_of(run)) if own else None
    model, optimizer, loader = training.prepared(run, model=model)
    try:
        for number, (inputs, targets) in enumerate(loader):
            if dist.get_rank() == victim and number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 0:
                with pytest.raises(RuntimeError, match="cannot be multiplied"):  # A model's own error stays as it is.
                    model(inputs[:, 1:])
            training.step(model, optimizer, inputs, targets)
    except RuntimeError as error:
        if own:
            sys.excepthook(type(error), error, error.__traceback__)
        else:
            with pytest.raises(RuntimeError) as caught:  # In a collective of the script's own it is the same.
                dist.barrier()
            shown += [(type(each).__name__, str(each), repr(each.__cause__)) for each in (error, caught.value)]
    return shown


def train_and_signal(run, victim, iteration, name):
    """Worker `victim` sends itself a signal; the environment alone says where the workers meet."""
    model, optimizer, loader = training.prepared(run)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            if dist.get_rank() == victim and loader.iteration == iteration:
                os.kill(os.getpid(), getattr(signal, name))
            training.step(model, optimizer, inputs, targets)
    return "finished"


def prepare_with_others(run, ranks, count, output):
    """Prepare as one of `ranks`, with `count` workers in all; what this process writes to standard error is kept."""
    own = ranks[int(os.environ["RANK"])]
    os.environ.update(RANK=str(own), WORLD_SIZE=str(count))
    with open(os.path.join(output, str(own)), "wb") as file:
        os.dup2(file.fileno(), 2)
    training.prepared(run)


def meeting_place():
    """An environment in which workers meet at worker 0, on a port of their own."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def run_hung(run, victim, moment, iteration):
    return run_workers(train_and_hang, 3, run, victim, moment, iteration, stopped=[victim])


def run_signalled(run, victim, iteration, name):
    stopped = [victim] if name == "SIGSTOP" else []
    return run_workers(
        train_and_signal,
        3,
        run,
        victim,
        iteration,
        name,
        stopped=stopped,
        environment=meeting_place(),
    )


def run_incomplete(run, ranks, count, output):
    return run_workers(
        prepare_with_others,
        len(ranks),
        run,
        ranks,
        count,
        str(output),
        environment=meeting_place(),
    )
