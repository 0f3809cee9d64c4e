"""Habits of scripts that fetch batches before they compute them; as in `support.habits`."""

import warnings
from contextlib import nullcontext
from itertools import islice
from queue import Queue
from threading import Thread

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.utils.data import default_collate

from support import training
from support.habits import GLOBAL_BATCH, batches, loader_of, ordinary, sgd, weights
from support.training import FEATURES

MASK = torch.ones(3)


def ahead(batches, depth):
    """As a prefetcher: that many batches are fetched before the first is computed."""
    batches = iter(batches)
    held = list(islice(batches, depth))
    while held:
        yield held.pop(0)
        held += islice(batches, 1)


def moved(batch):
    """As on its way to a device: other tensors with the same values."""
    return [tensor.clone() for tensor in batch]


def fetch_one_ahead(run, prepare, depth=2, form=list, train=training.step):
    """timm's and apex's prefetchers, Accelerate's loader: the next batch is fetched before this one is computed."""
    model, optimizer, loader = ordinary(run, prepare)
    for _ in range(run.epochs):
        for batch in ahead(map(form, loader), depth):
            train(model, optimizer, *batch)
    return weights(model)


def fetch_one_ahead_to_a_device(run, prepare):
    return fetch_one_ahead(run, prepare, form=moved)


def fetch_three_ahead(run, prepare):
    return fetch_one_ahead(run, prepare, depth=4)


def fetch_two_ahead_over_all_epochs(run, prepare):
    model, optimizer, loader = ordinary(run, prepare)
    for inputs, targets in ahead(batches(run, loader), 3):
        training.step(model, optimizer, inputs, targets)
    return weights(model)


def fetch_with_processes(run, prepare):
    model = training.model_of(run)
    model, optimizer, loader = prepare(model, training.optimizer_of(run, model), loader_of(run, num_workers=1))
    for _ in range(run.epochs):
        for inputs, targets in ahead(loader, 2):
            training.step(model, optimizer, inputs, targets)
    return weights(model)


def fetch_between_forward_and_backward(run, prepare, form=list):
    """nanoGPT: while the device computes, the next batch is fetched."""
    model, optimizer, loader = ordinary(run, prepare)
    stream = map(form, batches(run, loader))
    batch = next(stream, None)
    while batch is not None:
        inputs, targets = batch
        loss = mse_loss(model(inputs), targets)
        batch = next(stream, None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def fetch_in_between_to_a_device(run, prepare):
    return fetch_between_forward_and_backward(run, prepare, form=moved)


def accumulate_a_window_fetched_up_front(run, prepare, form=list, synchronise_each=False):
    """The Hugging Face Trainer: windows of four batches, the last one of an epoch shorter, with a short last slice."""
    model, optimizer, loader = ordinary(run, prepare)
    for _ in range(run.epochs):
        stream = map(form, loader)
        while window := list(islice(stream, 4)):
            for number, (inputs, targets) in enumerate(window, start=1):
                with nullcontext() if synchronise_each or number == len(window) else model.no_sync():
                    (mse_loss(model(inputs), targets) / len(window)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def accumulate_a_window_on_a_device(run, prepare):
    return accumulate_a_window_fetched_up_front(run, prepare, form=moved)


def accumulate_a_window_and_synchronise_each(run, prepare):
    return accumulate_a_window_fetched_up_front(run, prepare, synchronise_each=True)


def weigh_ahead(run, prepare, early=True):
    """The units of a batch are counted before its forward pass, or after it, when the next one is here already."""
    model, optimizer, loader = ordinary(run, prepare)
    for inputs, targets in ahead(batches(run, loader), 2):
        units = training.units_of(inputs)
        if early:
            loader.weigh_by(units.sum())
        outputs = model(inputs)
        if not early:
            loader.weigh_by(units.sum())
        optimizer.zero_grad()
        ((units * (outputs - targets) ** 2).sum() / units.sum()).backward()
        optimizer.step()
    return weights(model)


def weigh_ahead_after_the_forward_pass(run, prepare):
    return weigh_ahead(run, prepare, early=False)


def adversaries_ahead(run, prepare, form=list):
    """Several forward passes on each batch, of two models, with the next batch fetched already."""
    torch.manual_seed(2)
    double = torch.float64
    generator = torch.nn.Sequential(torch.nn.Linear(FEATURES, 5, dtype=double), torch.nn.Tanh())
    discriminator = torch.nn.Linear(5, 1, dtype=double)
    (generator, discriminator), (one, two), loader = prepare(
        (generator, discriminator), (sgd(generator), sgd(discriminator)), loader_of(run)
    )
    for inputs, _ in ahead(map(form, batches(run, loader)), 2):
        drawn = generator(inputs)
        two.zero_grad()
        (discriminator(inputs[:, :5]).sigmoid().mean() * -1).backward()
        discriminator(drawn.detach()).sigmoid().mean().backward()
        two.step()
        one.zero_grad()
        (-discriminator(drawn).sigmoid().mean()).backward()
        one.step()
    return weights(generator) + weights(discriminator)


def fetch_ahead_and_pad(run, prepare, told=lambda number: True):
    """All that a model is given has one shape, on a device: only the script knows which batch it is of."""
    model, optimizer, loader = ordinary(run, prepare)
    for number, (inputs, targets) in enumerate(ahead(batches(run, loader), 2)):
        if told(number):
            loader.computes(inputs)
        padded = torch.cat([inputs, inputs.new_zeros(GLOBAL_BATCH - len(inputs), FEATURES)])
        optimizer.zero_grad()
        mse_loss(model(padded)[: len(inputs)], targets).backward()
        optimizer.step()
    return weights(model)


def pad_and_tell_nothing(run, prepare):
    return fetch_ahead_and_pad(run, prepare, told=lambda number: False)


def pad_and_tell_the_first(run, prepare):
    return fetch_ahead_and_pad(run, prepare, told=lambda number: number == 0)


def tell_another_tensor(run, prepare):
    _, _, loader = ordinary(run, prepare)
    for _ in loader:
        loader.computes(torch.zeros(3))


def skip_batches(run, prepare):
    """As a script that resumes by itself: the first batches of an epoch are not computed."""
    model, optimizer, loader = ordinary(run, prepare)
    for _ in range(run.epochs):
        for number, (inputs, targets) in enumerate(loader):
            if number >= 3:
                training.step(model, optimizer, inputs, targets)
    return weights(model)


def go_backward_late(run, prepare):
    """The backward of a batch comes after the forward pass of the next."""
    model, optimizer, loader = ordinary(run, prepare)
    losses = []
    with model.no_sync():
        for inputs, targets in list(loader)[-3:]:  # The last is a short slice.
            losses.append(mse_loss(model(inputs), targets))
        sum(losses).backward()
    optimizer.step()


def go_backwards(run, prepare, form=list):
    """A window is computed from its last batch to its first."""
    model, optimizer, loader = ordinary(run, prepare)
    for batch in reversed([*map(form, loader)][-2:]):  # The last is a short slice.
        training.step(model, optimizer, *batch)
    return weights(model)


def go_backwards_on_a_device(run, prepare):
    return go_backwards(run, prepare, form=moved)


def compute_windows_twice(run, prepare, form=list):
    """Each batch of a window is computed, then each of them again."""
    model, optimizer, loader = ordinary(run, prepare)
    stream = map(form, loader)
    while window := list(islice(stream, 2)):
        for batch in (*window, *window):
            training.step(model, optimizer, *batch)


def compute_windows_twice_on_a_device(run, prepare):
    return compute_windows_twice(run, prepare, form=moved)


def with_a_mask(samples):
    """A batch whose last tensor is the same one in every batch."""
    return [*default_collate(samples), MASK]


class Masked(torch.nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, inputs, mask):
        return self.layers(inputs) * mask[0]


def go_backwards_with_a_mask(run, prepare):
    model = Masked(training.model_of(run)).double()
    model, optimizer, loader = prepare(model, training.optimizer_of(run, model), loader_of(run, collate_fn=with_a_mask))
    for inputs, targets, mask in reversed([*loader][-2:]):  # The last is a short slice.
        optimizer.zero_grad()
        mse_loss(model(inputs, mask), targets).backward()
        optimizer.step()


def compute_the_last_one_again(run, prepare):
    """A copy of the batch before takes part in each step."""
    model, optimizer, loader = ordinary(run, prepare)
    before = None
    for inputs, targets in map(moved, loader):
        loss = mse_loss(model(inputs), targets)
        if before is not None:
            loss = loss + mse_loss(model(before[0]), before[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        before = inputs, targets


def differentiate_by_hand(run, prepare):
    """The gradients are those of torch.autograd.grad, which DistributedDataParallel does not see."""
    model, optimizer, loader = ordinary(run, prepare)
    parameters = list(model.parameters())
    for inputs, targets in loader:
        gradients = torch.autograd.grad(mse_loss(model(inputs), targets), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()


def leave_out_a_step(run, prepare):
    """As a script that catches an error between backward and step, on one worker."""
    model, optimizer, loader = ordinary(run, prepare)
    for number, (inputs, targets) in enumerate(loader):
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        if dist.get_rank() != 1 or number != 2:
            optimizer.step()


def loop_in_a_thread(run, prepare):
    """A prefetcher whose thread loops over the loader, and hands on the error that ends its loop."""
    model, optimizer, loader = ordinary(run, prepare)
    fetched = Queue(2)

    def fetch():
        try:
            for batch in loader:
                fetched.put(batch)
        except Exception as error:
            fetched.put(error)

    Thread(target=fetch, daemon=True).start()
    while not isinstance(batch := fetched.get(), Exception):
        training.step(model, optimizer, *batch)
    raise batch


def keep_the_batches(run, prepare, form=list):
    """The batches of one epoch are kept, and used in each epoch."""
    model, optimizer, loader = ordinary(run, prepare)
    kept = [*map(form, loader)]
    for _ in range(2):
        for batch in kept:
            training.step(model, optimizer, *batch)
    return weights(model)


def cut_the_batches(run, prepare):
    """Batches on their way to a device are cut into pieces, each of which is computed by itself."""
    model, optimizer, loader = ordinary(run, prepare)
    for inputs, targets in ahead(map(moved, loader), 2):
        with model.no_sync():
            mse_loss(model(inputs[:2]), targets[:2]).backward()
        mse_loss(model(inputs[2:]), targets[2:]).backward()
        optimizer.step()
        optimizer.zero_grad()


def compute_each_twice(run, prepare, form=list):
    """A siamese model: two forward passes on each batch before the backward, with the next batch fetched already."""
    model, optimizer, loader = ordinary(run, prepare)
    for _ in range(run.epochs):
        for inputs, targets in ahead(map(form, loader), 2):
            optimizer.zero_grad()
            mse_loss(model(inputs * 0.5) + model(inputs * 2), targets).backward()
            optimizer.step()
    return weights(model)


def step_twice_on_each(run, prepare):
    """Several steps on each batch, with the next batch on its way to a device."""
    model, optimizer, loader = ordinary(run, prepare)
    for _ in range(run.epochs):
        for batch in ahead(map(moved, loader), 2):
            for _ in range(2):
                training.step(model, optimizer, *batch)
    return weights(model)


IN_ORDER = (
    fetch_one_ahead,
    fetch_three_ahead,
    fetch_two_ahead_over_all_epochs,
    fetch_with_processes,
    fetch_between_forward_and_backward,
    fetch_ahead_and_pad,
)
"""Those that step on each batch."""

EXACT = (
    *IN_ORDER,
    accumulate_a_window_fetched_up_front,
    accumulate_a_window_and_synchronise_each,
    weigh_ahead,
    weigh_ahead_after_the_forward_pass,
    adversaries_ahead,
    skip_batches,
    compute_each_twice,
)


def adversaries_ahead_on_a_device(run, prepare):
    return adversaries_ahead(run, prepare, form=moved)


def compute_each_twice_on_a_device(run, prepare):
    return compute_each_twice(run, prepare, form=moved)


def skip_some_on_a_device(run, prepare):
    """As a script that leaves out a batch in which it finds something wrong."""
    model, optimizer, loader = ordinary(run, prepare)
    for _ in range(run.epochs):
        for number, batch in enumerate(ahead(map(moved, loader), 2)):
            if number % 3 != 1:
                training.step(model, optimizer, *batch)
    return weights(model)


def keep_the_batches_on_a_device(run, prepare):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return keep_the_batches(run, prepare, form=moved)


UNCERTAIN = (
    adversaries_ahead_on_a_device,
    compute_each_twice_on_a_device,
    step_twice_on_each,
    skip_some_on_a_device,
    go_backwards_on_a_device,
)
"""Those where a worker cannot always tell: exact, or an error."""

MOVED = (fetch_one_ahead_to_a_device, fetch_in_between_to_a_device, accumulate_a_window_on_a_device)
"""Those that compute copies of what they were handed, which are recognised by their lengths."""
