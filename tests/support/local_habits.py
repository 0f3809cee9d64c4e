"""Habits of training scripts where each worker steps on its own gradients between two averages."""

import copy

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from support import training
from support.training import step, weights


def adversarial(run, toggles):
    """Two models, of which the first, if it `toggles`, is frozen from its own step to the next iteration's."""
    first, second = training.model_of(run), training.model_of(run)
    one, two = (torch.optim.SGD(model.parameters(), lr=0.05) for model in (first, second))
    loader = DataLoader(TensorDataset(*training.data(run)), batch_size=run.batch_size, shuffle=True)
    models, (one, two), loader = evenstep.prepare(
        (first, second), (one, two), loader, scheme=run.chosen_scheme(), seed=run.seed
    )
    for _ in range(run.epochs):
        for inputs, targets in loader:
            first.requires_grad_(True)
            step(models[0], one, inputs, targets)
            first.requires_grad_(not toggles)
            step(models[1], two, inputs, -targets)
    return weights(first) + weights(second)


class Masked(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))

    def forward(self, inputs):
        return self.inner(inputs)


def masked(run):
    """A model with a buffer of zeros and infinities, like an attention mask."""
    model, optimizer, loader = training.prepared(run, Masked(training.model_of(run)))
    for _ in range(run.epochs):
        for inputs, targets in loader:
            step(model, optimizer, inputs, targets)
    return weights(model)


def leave_every_loop(run, stop, settles):
    """Each loop is left after a few batches, before the first average; the last one settles."""
    model, optimizer, loader = training.prepared(run)
    for epoch in range(run.epochs):
        for number, (inputs, targets) in enumerate(loader, 1):
            step(model, optimizer, inputs, targets)
            if number == stop:
                break
        if settles or epoch == run.epochs - 1:
            loader.settle()
    return weights(model)


def roll_back(run, stop_after, further):
    """As `train_and_resume`, but the same objects go on in between, and leave that loop too."""
    model, optimizer, loader = training.prepared(run)
    saved = None
    for stop in (stop_after, further):
        for number, (inputs, targets) in enumerate(loader, 1):
            step(model, optimizer, inputs, targets)
            if number == stop:
                break
        if saved is None:
            loader.settle()
            saved = copy.deepcopy([each.state_dict() for each in (loader, model, optimizer)])
    for each, state in zip((loader, model, optimizer), saved, strict=True):
        each.load_state_dict(state)
    for _ in range(loader.epoch, run.epochs):
        for inputs, targets in loader:
            step(model, optimizer, inputs, targets)
    return weights(model)


def count_alike(run, count):
    """Every batch of every worker counts as much; returns the weights after each epoch."""
    model, optimizer, loader = training.prepared(run)
    found = []
    for _ in range(run.epochs):
        for inputs, targets in loader:
            loader.weigh_by(count)
            step(model, optimizer, inputs, targets)
        found += weights(model)
    return found


def skip_batches(run, worker, skipped, looks):
    """This worker does not compute these batches of an epoch, or only `looks` at their losses; as `train_locally`."""
    model, optimizer, loader = training.prepared(run)
    positions = []
    for epoch in range(run.epochs):
        for number, (inputs, targets) in enumerate(loader):
            share, skips = loader.newest, loader.engine.workers.rank == worker and number in skipped
            own = [] if skips else list(share.positions[: share.samples])
            positions.append((epoch, share.iteration, own, share.ends_epoch))
            if not skips:
                step(model, optimizer, inputs, targets)
            elif looks:
                torch.nn.functional.mse_loss(model(inputs), targets)
    return {"weights": weights(model), "positions": positions}


def skip_where_sizes_change(run, worker, skipped):
    """What is said where this worker alone skips this batch, whose period ends before the sizes change."""
    try:
        skip_batches(run, worker, (skipped,), looks=False)
    except evenstep.DisagreementError as error:
        return str(error)


def go_backward_late(run):
    """What is said where the backward of a period's last batch comes after the next forward pass."""
    model, _, loader = training.prepared(run)
    losses = []
    try:
        for inputs, targets in loader:
            losses.append(torch.nn.functional.mse_loss(model(inputs), targets))
            if len(losses) > 1:
                losses.pop(0).backward()
    except evenstep.ConfigError as error:
        return str(error)


def overflow(run, worker, iteration):
    """A GradScaler of this worker finds an overflow in this iteration."""
    model, optimizer, loader = training.prepared(run)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            spoilt = dist.get_rank() == worker and loader.iteration == iteration
            scaler.scale(loss * torch.inf if spoilt else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    states = [each.flatten().tolist() for state in optimizer.state.values() for each in state.values()]
    return {"weights": weights(model), "states": states}


def spoil_now_and_then(run, worker):
    """In every second iteration this worker's loss is not finite; how many there were of these, and its weights."""
    model, optimizer, loader = training.prepared(run)
    spoilt = iterations = 0
    for _ in range(run.epochs):
        for inputs, targets in loader:
            iterations += 1
            spoils = dist.get_rank() == worker and iterations % 2 == 0
            spoilt += spoils
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            (loss * torch.nan if spoils else loss).backward()
            optimizer.step()
    return {"spoilt": spoilt, "weights": weights(model)}


def split_optimizer(run):
    """What is said of an optimizer that is split over the workers."""
    # Its module warns of its own use of TorchScript.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = training.model_of(run)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    loader = DataLoader(TensorDataset(*training.data(run)), batch_size=run.batch_size)
    try:
        evenstep.prepare(model, optimizer, loader, scheme=run.scheme)
    except evenstep.ConfigError as error:
        return str(error)


class EightBits(torch.optim.SGD):
    """Keeps codes of the gradients, in integers."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["codes"] = (parameter.grad * 100).to(torch.int8)
        return super().step(closure)


def integer_state(run):
    """What is said of an optimizer whose state is in integers, at the first average."""
    model = training.model_of(run)
    loader = DataLoader(TensorDataset(*training.data(run)), batch_size=run.batch_size)
    model, optimizer, loader = evenstep.prepare(model, EightBits(model.parameters(), lr=0.1), loader, scheme=run.scheme)
    try:
        for inputs, targets in loader:
            step(model, optimizer, inputs, targets)
    except evenstep.ConfigError as error:
        return str(error)
    return weights(model)
