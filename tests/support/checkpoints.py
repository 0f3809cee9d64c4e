"""What the tests of checkpoints run in their worker processes."""

import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from support import training


def train_saving(run, folder, save_at, *, leave=True, **options):
    """Trains, and saves after these iterations; leaves right after the last of them, unless told to go on."""
    model, optimizer, loader = training.prepared(run)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
            if loader.iteration in save_at:
                evenstep.checkpoint.save(folder, model, optimizer, loader, **options)
                if leave and loader.iteration == max(save_at):
                    return {"weights": training.weights(model), **learnt(loader)}
    loader.close()  # A thread may still write.
    return {"weights": training.weights(model)}


def train_restored(run, folder):
    """Goes on from the checkpoint; returns what was learnt before, the positions trained on, and the weights."""
    model, optimizer, loader = training.prepared(run)
    restored = evenstep.checkpoint.restore(folder, model, optimizer, loader)
    assert restored is not None
    before, epochs, iterations = learnt(loader), [], 0
    for epoch in range(loader.epoch, run.epochs):
        assert loader.epoch == epoch
        epochs.append(epoch)
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
            assert loader.epoch == epoch
            iterations += 1
    return {
        "weights": training.weights(model),
        "name": restored.name,
        "epochs": epochs,
        "iterations": iterations,
        **before,
    }


def train_with_states_cut_over_the_workers(run, folder, save_at=None):
    """With a ZeroRedundancyOptimizer; saves and leaves at `save_at`, or goes on from there."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # It warns of itself.

    network = training.model_of(run)
    optimizer = ZeroRedundancyOptimizer(network.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*training.data(run)), batch_size=run.batch_size, shuffle=True
    )
    model, optimizer, loader = evenstep.prepare(network, optimizer, loader, scheme=run.chosen_scheme(), seed=run.seed)
    if save_at is None:
        evenstep.checkpoint.restore(folder, model, optimizer, loader)
    for _ in range(loader.epoch, run.epochs):
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
            if loader.iteration == save_at:
                evenstep.checkpoint.save(folder, model, optimizer, loader)
                return None
    return {"weights": training.weights(model)}


def learnt(loader):
    """What this worker knows of its speed, and everybody of the sizes."""
    tracker = loader.engine.tracker
    return {"forecaster": tracker.meter.state_dict(), "policy": tracker.policy.state_dict()}


def train_accumulating(run, folder, save_at=None):
    """Windows of `run.accumulate` iterations counted from the beginning of a loop, synchronised in the last of them.

    With `save_at` it saves there, which may be in mid-window, and leaves; without, it goes on from what was saved.
    """
    model, optimizer, loader = training.prepared(run)
    if save_at is None:
        evenstep.checkpoint.restore(folder, model, optimizer, loader)
    for _ in range(loader.epoch, run.epochs):
        for index, (inputs, targets) in enumerate(loader):
            last = index % run.accumulate == run.accumulate - 1
            if last:
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
            else:
                with model.no_sync():
                    torch.nn.functional.mse_loss(model(inputs), targets).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            if loader.iteration == save_at:
                evenstep.checkpoint.save(folder, model, optimizer, loader)
                return None
    return {"weights": training.weights(model)}


def train_with_extras(run, folder, save_at=None):
    """With a scheduler, an average of the weights and dropout; saves and leaves at `save_at`, or goes on from there."""
    torch.manual_seed(1 if save_at else 99)
    network = torch.nn.Sequential(training.model_of(run), torch.nn.Dropout(0.5))
    torch.manual_seed(5 if save_at else 99)  # Of dropout, which goes on where it was.
    optimizer = training.optimizer_of(run, network)
    scheduler, average = StepLR(optimizer, 3, gamma=0.5), AveragedModel(network)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*training.data(run)), batch_size=run.batch_size, shuffle=True
    )
    model, optimizer, loader = evenstep.prepare(network, optimizer, loader, scheme=run.chosen_scheme(), seed=run.seed)
    extras = {"scheduler": scheduler, "average": average}
    if save_at is None:
        evenstep.checkpoint.restore(folder, model, optimizer, loader, extras=extras)
    for _ in range(loader.epoch, run.epochs):
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
            scheduler.step()
            average.update_parameters(network)
            if loader.iteration == save_at:
                evenstep.checkpoint.save(folder, model, optimizer, loader, extras=extras)
    return {
        "weights": training.weights(model),
        "average": training.weights(average),
        "rate": optimizer.param_groups[0]["lr"],
    }


class Kills:
    """An extra whose state ends one worker's process, in the midst of a checkpoint."""

    def __init__(self, worker):
        self.worker = worker

    def state_dict(self):
        if dist.get_rank() == self.worker:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def load_state_dict(self, state):
        raise AssertionError(state)


def die_while_saving(run, folder, worker):
    """Saves once; then again, where one worker dies meanwhile."""
    model, optimizer, loader = training.prepared(run)
    for inputs, targets in loader:
        training.step(model, optimizer, inputs, targets)
        if loader.iteration == 2:
            evenstep.checkpoint.save(folder, model, optimizer, loader)
        if loader.iteration == 4:
            evenstep.checkpoint.save(folder, model, optimizer, loader, extras={"extra": Kills(worker)})
    return None


class HeldBack:
    """Holds back whatever opens a file with this end of its name, until it may `go` or the block ends."""

    def __init__(self, end):
        self.reached, self.go = threading.Event(), threading.Event()
        self._end = end

    def __enter__(self):
        sys.addaudithook(self._hear)
        return self

    def _hear(self, event, arguments):
        if event == "open" and not self.go.is_set() and str(arguments[0]).endswith(self._end):
            self.reached.set()
            self.go.wait()

    def __exit__(self, *exception):
        self.go.set()


def die_while_writing(run, folder, worker):
    """Saves once; then again while training goes on, where one worker dies before its file."""
    model, optimizer, loader = training.prepared(run)
    with HeldBack(f"__{worker}_0.distcp") as writer:
        writer.go.set()
        for _ in range(run.epochs):
            for inputs, targets in loader:
                training.step(model, optimizer, inputs, targets)
                if loader.iteration == 2:
                    evenstep.checkpoint.save(folder, model, optimizer, loader)
                    writer.go.clear()
                if loader.iteration == 4:
                    evenstep.checkpoint.save(folder, model, optimizer, loader, asynchronous=True)
                    if dist.get_rank() == worker:
                        writer.reached.wait()
                        os.kill(os.getpid(), signal.SIGKILL)
    return None


class Odd:
    """On worker 0, its state is more than plain values."""

    def state_dict(self):
        return {"self": self} if dist.get_rank() == 0 else {}

    def load_state_dict(self, state):
        raise AssertionError(state)


def save_what_one_cannot(run, folder):
    """What each worker is told, of an extra that only worker 0 saves in vain, and of one that only worker 1 has."""
    model, optimizer, loader = training.prepared(run)
    said = []
    for extras in ({"odd": Odd()}, {"own": optimizer} if dist.get_rank() else {}):
        try:
            evenstep.checkpoint.save(folder, model, optimizer, loader, extras=extras)
        except evenstep.EvenstepError as error:
            said.append(f"{type(error).__name__}: {error}")
    evenstep.checkpoint.save(folder, model, optimizer, loader)
    return said


def save_where_nothing_can_be(run, folder):
    """Every worker is to raise, worker 1 too, which makes no folder."""
    model, optimizer, loader = training.prepared(run)
    for inputs, targets in loader:
        training.step(model, optimizer, inputs, targets)
        try:
            evenstep.checkpoint.save(folder, model, optimizer, loader)
        except evenstep.CheckpointError as error:
            return str(error)
    return None


def save_under_servers(folder):
    """What saving is refused with."""
    model, optimizer, loader = training.prepared(training.Run(scheme="asp"))
    with loader:
        try:
            evenstep.checkpoint.save(folder, model, optimizer, loader)
        except evenstep.ConfigError as error:
            return str(error)


def train_in_turn(run, folder, *, stop=False, go_on=False):
    """On a loader and on shares by turns, to the weights; stops after a checkpoint in mid-epoch, or goes on from it."""
    model = training.model_of(run)
    inputs, targets = training.data(run)
    with evenstep.Session("bsp", seed=run.seed) as session:
        loader = session.loader(DataLoader(TensorDataset(inputs, targets), batch_size=run.batch_size, shuffle=True))
        shares = session.shares(run.samples, 2 * run.batch_size)
        prepared, optimizer = session.model(model), session.optimizer(training.optimizer_of(run, model))
        if go_on:
            evenstep.checkpoint.restore(folder, prepared, optimizer, (loader, shares))
        for _ in range(shares.epoch, run.epochs):
            for batch in loader if loader.epoch == shares.epoch else ():
                training.step(prepared, optimizer, *batch)
            for share in shares:
                training.step(prepared, optimizer, inputs[share.positions], targets[share.positions])
                if stop and shares.epoch == 1 and share.iteration == 1:
                    evenstep.checkpoint.save(folder, prepared, optimizer, (loader, shares))
                    return None
        return training.weights(model)
