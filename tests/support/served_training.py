"""What the workers of runs on servers run in the tests; each function returns plain values."""

import torch
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from support import own_optimizers, training
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
            positions[-1].append(seen(loader))
        scheduler.step()
        ended.append(weights(model))
    return {"ended": ended, "positions": positions}


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
