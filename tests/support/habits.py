"""Habits of real training scripts, each written once and run twice: with the one line of evenstep, and without it.

A habit is a function of a `Run` and of what stands where `evenstep.prepare` does; it returns numbers to compare.
Without evenstep one process trains on the global batch, in plain torch (`alone`).
"""

import math
import pickle
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from support import training
from support.training import FEATURES, model_of, weights

WORKERS = 3
GLOBAL_BATCH = 15


class PlainModel(torch.nn.Module):
    """What a prepared model is to a script, in one process without evenstep."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True

    def forward(self, *args):
        return self.module(*args)

    def no_sync(self):
        return nullcontext()

    def join(self):
        return nullcontext()


class PlainLoader:
    """Whole global batches in the documented order."""

    global_batch_size = GLOBAL_BATCH

    def __init__(self, run, loader):
        self.run = run
        self.dataset = loader.dataset
        self.epoch = 0
        self.iteration = 0
        self.slice_length = 0

    def __len__(self):
        return math.ceil(self.run.samples / GLOBAL_BATCH)

    def __iter__(self):
        order = training.epoch_order(self.run, self.epoch)
        self.epoch += 1
        for part in order.split(GLOBAL_BATCH):
            self.iteration += 1
            self.slice_length = len(part)
            yield [tensor[part] for tensor in self.dataset.tensors]

    def weigh_by(self, count):
        """There is nobody else."""

    def computes(self, batch):
        """It is the only one."""

    def mean_over_workers(self, value, count):
        return value


def alone(habit, run):
    """What a habit comes to in one process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return habit(run, lambda model, optimizer, loader, **_: (plain(model), optimizer, PlainLoader(run, loader)))
    finally:
        torch.set_num_threads(threads)


def plain(model):
    return tuple(map(PlainModel, model)) if isinstance(model, tuple) else PlainModel(model)


def together(habits, run, schemes):
    """What each habit comes to under each scheme, by both names; an error is text."""
    found = {}
    for scheme, options in schemes.items():
        for habit in habits:
            found[scheme, habit.__name__] = attempt(habit, run, options)
    return found


def attempt(habit, run, options):
    loaders = []

    def prepare(model, optimizer, loader, **more):
        if isinstance(options.get("cost"), evenstep.Padded):
            loader.collate_fn = training.stacked
        given = {"seed": run.seed, "timeout": 60.0, **options, **more}
        prepared = evenstep.prepare(model, optimizer, loader, **given)
        loaders.append(prepared[2])
        return prepared

    try:
        return habit(run, prepare)
    except evenstep.EvenstepError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error} (of {error.__cause__ or error.__context__!r})"
    finally:
        for loader in loaders:
            loader.close()


def loader_of(run, **options):
    return DataLoader(TensorDataset(*training.data(run)), batch_size=run.batch_size, **{"shuffle": True, **options})


def sgd(*models, momentum=0.9):
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.05, momentum=momentum)


def ordinary(run, prepare, model=None):
    """Model, optimizer and loader of a run, prepared."""
    model = model_of(run) if model is None else model
    return prepare(model, training.optimizer_of(run, model), loader_of(run))


def batches(run, loader):
    for _ in range(run.epochs):
        yield from loader


def distributed(model, **options):
    """As a script does that wraps its model itself."""
    return DistributedDataParallel(model, **options) if dist.is_initialized() else model


def loop_in_join(run, prepare):
    """As for inputs whose number differs from worker to worker."""
    model, optimizer, loader = ordinary(run, prepare)
    for epoch in range(run.epochs):
        with model.join() if epoch % 2 or isinstance(model, PlainModel) else Join([model]):
            for inputs, targets in loader:
                optimizer.zero_grad()
                mse_loss(model(inputs), targets).backward()
                optimizer.step()
    return weights(model)


def step_in_inner_loops(run, prepare):
    """An optimizer of each batch's own moves its inputs, as for adversarial examples."""
    model, optimizer, loader = ordinary(run, prepare)
    for inputs, targets in batches(run, loader):
        moved = torch.nn.Parameter(inputs.clone())
        inner = torch.optim.SGD([moved], lr=0.1)
        for _ in range(2):
            inner.zero_grad()
            moved.square().sum().backward()
            inner.step()
        optimizer.zero_grad()
        mse_loss(model(moved.detach()), targets).backward()
        optimizer.step()
    return weights(model)


# Gradients.


def clip_the_norm(run, prepare):
    model, optimizer, loader = ordinary(run, prepare)
    norms = []
    for inputs, targets in batches(run, loader):
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)))
        optimizer.step()
    assert min(norms) < 2.0 < max(norms)
    return weights(model) + norms


def accumulate_in_no_sync(run, prepare, weighed=False):
    """Windows of three batches, which run across epochs."""
    model, optimizer, loader = ordinary(run, prepare)
    for number, (inputs, targets) in enumerate(batches(run, loader), start=1):
        last = number % 3 == 0
        with nullcontext() if last else model.no_sync():
            outputs = model(inputs)
            if weighed:
                units = training.units_of(inputs)
                loader.weigh_by(units.sum())
                loss = (units * (outputs - targets) ** 2).sum() / units.sum()
            else:
                loss = mse_loss(outputs, targets)
            (loss / 3).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def accumulate_and_weigh(run, prepare):
    return accumulate_in_no_sync(run, prepare, weighed=True)


def accumulate_and_weigh_alike(run, prepare):
    """Windows of two batches, by a number of units that is the same for every sample."""
    model, optimizer, loader = ordinary(run, prepare)
    for number, (inputs, targets) in enumerate(batches(run, loader), start=1):
        with model.no_sync() if number % 2 else nullcontext():
            loader.weigh_by(7 * len(inputs))
            mse_loss(model(inputs), targets).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def accumulate_and_synchronise_each(run, prepare):
    model, optimizer, loader = ordinary(run, prepare)
    for number, (inputs, targets) in enumerate(batches(run, loader), start=1):
        (mse_loss(model(inputs), targets) / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def count_nothing_after_a_sum(run, prepare):
    """The second batch of a window has no units on any worker, so the sum of the first one stays as it is."""
    model, optimizer, loader = ordinary(run, prepare)
    for number, (inputs, targets) in enumerate(batches(run, loader), start=1):
        loader.weigh_by(len(inputs) if number % 2 else 0)
        loss = mse_loss(model(inputs), targets)
        (loss if number % 2 else 0 * loss).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def normalise_over_all_and_synchronise_each(run, prepare):
    """A loss that the script divides by the samples of all workers, of which some have none at the end of an epoch."""
    model = model_of(run)
    model, optimizer, loader = prepare(model, training.optimizer_of(run, model), loader_of(run), weights="script")
    for number, (inputs, targets) in enumerate(batches(run, loader), start=1):
        loss = mse_loss(model(inputs), targets, reduction="sum")
        if isinstance(loader, PlainLoader):
            loss = loss / len(inputs)
        else:
            share = loader.current
            loss = loss * WORKERS / int(share.sizes.sum()) * (share.samples > 0)
        loss.backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def accumulate_by_the_flag(run, prepare):
    model, optimizer, loader = ordinary(run, prepare)
    for number, (inputs, targets) in enumerate(batches(run, loader), start=1):
        model.require_backward_grad_sync = number % 2 == 0
        mse_loss(model(inputs), targets).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def accumulate_in_views_of_buckets(run, prepare):
    return accumulate_in_no_sync(
        run, lambda model, *others: prepare(distributed(model, gradient_as_bucket_view=True), *others)
    )


def add_up_losses(run, prepare):
    """Two losses of one forward pass, one of them of the parameters, and two forward passes for one backward."""
    model, optimizer, loader = ordinary(run, prepare)
    for inputs, targets in batches(run, loader):
        outputs, others = model(inputs), model(-inputs)
        penalty = sum((parameter**2).sum() for parameter in model.parameters())
        loss = mse_loss(outputs, targets) + 0.1 * outputs.abs().mean() + 0.3 * mse_loss(others, targets)
        optimizer.zero_grad()
        (loss + 1e-3 * penalty).backward()
        optimizer.step()
    return weights(model)


def backward_twice(run, prepare):
    """A forward and a backward for each of two losses, whose gradients add up."""
    model, optimizer, loader = ordinary(run, prepare)
    for inputs, targets in batches(run, loader):
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        (0.5 * model(-inputs).abs().mean()).backward()
        optimizer.step()
    return weights(model)


def keep_gradients_of_the_last_iteration(run, prepare):
    """The tensors of `.grad` themselves, without a copy, as a momentum by hand."""
    model, optimizer, loader = ordinary(run, prepare)
    last = []
    for inputs, targets in batches(run, loader):
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        kept = [parameter.grad for parameter in model.parameters()]
        for parameter, before in zip(model.parameters(), last, strict=False):
            parameter.grad = parameter.grad + 0.5 * before
        last = kept
        optimizer.step()
    return weights(model)


def add_gradients_of_two_losses_by_hand(run, prepare):
    """As where the gradients of several tasks are projected before they are added."""
    model, optimizer, loader = ordinary(run, prepare)
    for inputs, targets in batches(run, loader):
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        first = [parameter.grad for parameter in model.parameters()]
        optimizer.zero_grad()
        model(inputs).abs().mean().backward()
        for parameter, other in zip(model.parameters(), first, strict=True):
            parameter.grad = parameter.grad + 0.3 * other
        optimizer.step()
    return weights(model)


def change_the_memory_format(run, prepare):
    torch.manual_seed(4)
    model = torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 2, FEATURES // 2)), torch.nn.Conv2d(1, 4, (2, 2)), torch.nn.Flatten(),
        torch.nn.LazyLinear(1),
    ).double()  # fmt: skip
    model(torch.zeros(1, FEATURES, dtype=torch.float64))
    inner = model
    model, optimizer, loader = prepare(model, sgd(model), loader_of(run))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Grad strides do not match")
        for number, (inputs, targets) in enumerate(batches(run, loader)):
            if number == 4:
                inner.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return weights(model)


def embed_with_sparse_gradients(run, prepare):
    torch.manual_seed(4)
    model = torch.nn.Sequential(
        torch.nn.EmbeddingBag(7, 3, mode="mean", sparse=True, dtype=torch.float64), torch.nn.Linear(3, 1).double()
    )
    model, optimizer, loader = prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), loader_of(run))
    for inputs, targets in batches(run, loader):
        optimizer.zero_grad()
        mse_loss(model((inputs.abs() * 10).long() % 7), targets).backward()
        optimizer.step()
    return weights(model)


def adversaries(run, prepare):
    """A generator and a discriminator, each with its optimizer and its step in every iteration."""
    torch.manual_seed(2)
    double = torch.float64
    generator = torch.nn.Sequential(torch.nn.Linear(FEATURES, 5, dtype=double), torch.nn.Tanh())
    discriminator = torch.nn.Sequential(
        torch.nn.Linear(5, 4, dtype=double), torch.nn.Tanh(), torch.nn.Linear(4, 1, dtype=double)
    )
    (generator, discriminator), (one, two), loader = prepare(
        (generator, discriminator), (sgd(generator), sgd(discriminator)), loader_of(run)
    )
    for inputs, _ in batches(run, loader):
        drawn = generator(inputs)
        two.zero_grad()
        (discriminator(inputs[:, :5]).sigmoid().mean() * -1).backward()
        discriminator(drawn.detach()).sigmoid().mean().backward()
        two.step()
        one.zero_grad()
        for parameter in discriminator.parameters():
            parameter.requires_grad_(False)
        (-discriminator(drawn).sigmoid().mean()).backward()
        for parameter in discriminator.parameters():
            parameter.requires_grad_(True)
        one.step()
    return weights(generator) + weights(discriminator)


def two_models_one_backward(run, prepare):
    """An encoder and a decoder behind one loss, and one optimizer for both."""
    torch.manual_seed(3)
    encoder = torch.nn.Linear(FEATURES, 4, dtype=torch.float64)
    decoder = torch.nn.Linear(4, 1, dtype=torch.float64)
    (encoder, decoder), optimizer, loader = prepare((encoder, decoder), sgd(encoder, decoder), loader_of(run))
    for inputs, targets in batches(run, loader):
        optimizer.zero_grad()
        mse_loss(decoder(encoder(inputs).tanh()), targets).backward()
        optimizer.step()
    return weights(encoder) + weights(decoder)


def two_optimizers_one_model(run, prepare):
    model = model_of(run)
    first, last = sgd(model[0]), torch.optim.Adam(model[2].parameters(), lr=0.01)
    model, (first, last), loader = prepare(model, (first, last), loader_of(run))
    for inputs, targets in batches(run, loader):
        first.zero_grad()
        last.zero_grad()
        mse_loss(model(inputs), targets).backward()
        first.step()
        last.step()
    return weights(model)


def freeze_a_layer(run, prepare):
    """From the beginning, and weight decay is not to move it either."""
    model = model_of(run)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
    model, optimizer, loader = prepare(model, optimizer, loader_of(run))
    for inputs, targets in batches(run, loader):
        training.step(model, optimizer, inputs, targets)
    return weights(model)


def freeze_a_layer_later(run, prepare):
    """After the first epoch."""
    model, optimizer, loader = ordinary(
        run, lambda model, *others: prepare(distributed(model, find_unused_parameters=True), *others)
    )
    for epoch in range(run.epochs):
        model.module[0].requires_grad_(epoch == 0)
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
    return weights(model)


class Branches(torch.nn.Module):
    """Uses one of two branches, and never the third."""

    def __init__(self, run):
        super().__init__()
        self.body = model_of(run)[:2]
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, 1, dtype=run.dtype) for _ in range(3))

    def forward(self, inputs, uplink):
        return self.heads[uplink](self.body(inputs))


def leave_parameters_unused(run, prepare):
    torch.manual_seed(4)
    model, optimizer, loader = ordinary(
        run, lambda model, *others: prepare(distributed(model, find_unused_parameters=True), *others), Branches(run)
    )
    for number, (inputs, targets) in enumerate(batches(run, loader)):
        optimizer.zero_grad()
        mse_loss(model(inputs, number // 2 % 2), targets).backward()
        optimizer.step()
    assert all(parameter.grad is None for parameter in model.module.heads[2].parameters())
    return weights(model)


def a_static_graph(run, prepare):
    model, optimizer, loader = ordinary(
        run, lambda model, *others: prepare(distributed(model, static_graph=True), *others)
    )
    for inputs, targets in batches(run, loader):
        training.step(model, optimizer, inputs, targets)
    return weights(model)


def pickle_ones_own_ddp(run, prepare):
    """With the gradients of an iteration, as `torch.save(model)` and `copy.deepcopy(model)` do."""
    model, optimizer, loader = ordinary(run, lambda model, *others: prepare(distributed(model), *others))
    for inputs, targets in batches(run, loader):
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        assert weights(pickle.loads(pickle.dumps(model))) == weights(model)
        optimizer.step()
    return weights(model)


class Checkpointed(torch.nn.Module):
    def __init__(self, run):
        super().__init__()
        self.layers = model_of(run)

    def forward(self, inputs):
        hidden = checkpoint(self.layers[:2], inputs, use_reentrant=False)
        return checkpoint(self.layers[2], hidden, use_reentrant=True)


def checkpoint_activations(run, prepare):
    model, optimizer, loader = ordinary(run, prepare, Checkpointed(run))
    for inputs, targets in batches(run, loader):
        training.step(model, optimizer, inputs, targets)
    return weights(model)


def penalise_gradients(run, prepare):
    """The gradient of a gradient, as in WGAN-GP."""
    model, optimizer, loader = ordinary(run, prepare)
    for inputs, targets in batches(run, loader):
        inputs.requires_grad_(True)
        outputs = model(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        optimizer.zero_grad()
        (mse_loss(outputs, targets) + 0.1 * (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()
    return weights(model)


def compose_a_hook(run, prepare):
    def hooked(*parts):
        return prepare(*parts, **({"comm_hook": (None, allreduce_hook)} if dist.is_initialized() else {}))

    return accumulate_in_no_sync(run, hooked)


def compress_to_float16(run, prepare):
    """PyTorch's own hook, which averages what it has rounded."""

    def hooked(*parts):
        return prepare(*parts, **({"comm_hook": (None, fp16_compress_hook)} if dist.is_initialized() else {}))

    return accumulate_in_no_sync(run, hooked)


def step_with_a_closure(run, prepare):
    model, optimizer, loader = ordinary(run, prepare)
    for inputs, targets in batches(run, loader):
        loss = optimizer.step(training.closure_of(model, optimizer, inputs, targets))
        assert loss.item() > 0
    return weights(model)


def accumulate_into_a_closure(run, prepare):
    """Windows of two batches, the last backward of which is in the closure, as Lightning's."""
    model, optimizer, loader = ordinary(run, prepare)
    for number, (inputs, targets) in enumerate(batches(run, loader), start=1):

        def closure(inputs=inputs, targets=targets):
            loss = mse_loss(model(inputs), targets) / 2
            loss.backward()
            return loss

        if number % 2:
            with model.no_sync():
                closure()
        else:
            optimizer.step(closure)
            optimizer.zero_grad()
    return weights(model)


def step_between_loops(run, prepare):
    """Each epoch ends with a step on samples of the script's own, of which workers take equal parts."""
    model, optimizer, loader = ordinary(run, prepare)
    own = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2) if dist.is_initialized() else slice(0, 2 * WORKERS)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
        training.step(model, optimizer, *(tensor[own] for tensor in loader.dataset.tensors))
    return weights(model)


def train_in_eval_mode(run, prepare):
    """As with frozen BatchNorm; the windows of accumulation are heeded there too."""
    model, optimizer, loader = ordinary(run, prepare)
    model.eval()
    return windows_of_two(run, model, optimizer, loader)


def windows_of_two(run, model, optimizer, loader):
    for number, (inputs, targets) in enumerate(batches(run, loader), start=1):
        with model.no_sync() if number % 2 else nullcontext():
            mse_loss(model(inputs), targets).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


# Mixed precision.


def scale_the_loss(run, prepare):
    """A GradScaler whose gradients overflow on one worker at a time; every other gradient is clipped."""
    model, optimizer, loader = ordinary(run, prepare)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    rank = dist.get_rank() if dist.is_initialized() else None
    scales = []
    for number, (inputs, targets) in enumerate(batches(run, loader)):
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        victim = {1: 1, 2: 2, 7: 0}.get(number)
        if victim is not None and rank in (None, victim):
            loss = loss * math.inf
        scaler.scale(loss).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert len(set(scales)) > 2
    return weights(model) + scales


def scale_for_a_fused_optimizer(run, prepare):
    """Which takes the scale, and what the scaler has found, into its step."""
    model = model_of(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    model, optimizer, loader = prepare(model, optimizer, loader_of(run))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    rank = dist.get_rank() if dist.is_initialized() else None
    for number, (inputs, targets) in enumerate(batches(run, loader)):
        optimizer.zero_grad()
        overflows = number == 4 and rank in (None, 1)
        scaler.scale(mse_loss(model(inputs), targets) * (math.inf if overflows else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    return weights(model)


def overflow_everywhere(run, prepare):
    """A GradScaler whose gradients overflow on all workers in the same iterations, as the one process's do."""
    model, optimizer, loader = ordinary(run, prepare)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for number, (inputs, targets) in enumerate(batches(run, loader)):
        optimizer.zero_grad()
        scaler.scale(mse_loss(model(inputs), targets) * (math.inf if number in (1, 2, 7) else 1)).backward()
        if number % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return weights(model)


def scale_and_accumulate(run, prepare):
    model, optimizer, loader = ordinary(run, prepare)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    for number, (inputs, targets) in enumerate(batches(run, loader), start=1):
        with model.no_sync() if number % 2 else nullcontext():
            scaler.scale(mse_loss(model(inputs), targets)).backward()
        if number % 2 == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return weights(model)


def autocast_to_bfloat16(run, prepare):
    model = model_of(run).float()
    model, optimizer, loader = ordinary(run, prepare, model)
    for inputs, targets in batches(run, loader):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = model(inputs.float())
            assert outputs.dtype == torch.bfloat16
            loss = mse_loss(outputs.float(), targets.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(model)


# BatchNorm.


def normalise_batches(run, prepare):
    """The running mean of what comes in, which is that of the union batches."""
    norm = torch.nn.BatchNorm1d(FEATURES, dtype=run.dtype)
    model, optimizer, loader = ordinary(run, prepare, torch.nn.Sequential(norm, *model_of(run)))
    for inputs, targets in batches(run, loader):
        training.step(model, optimizer, inputs, targets)
    return norm.running_mean.tolist()


def normalise_and_report(run, prepare):
    """Everything that a checkpoint would hold."""
    norm = torch.nn.BatchNorm1d(8, dtype=run.dtype)
    layers = model_of(run)
    model, optimizer, loader = ordinary(run, prepare, torch.nn.Sequential(layers[0], norm, *layers[1:]))
    for inputs, targets in batches(run, loader):
        training.step(model, optimizer, inputs, targets)
    return [value for tensor in model.state_dict().values() for value in tensor.flatten().tolist()]


# Losses.


def count_after_the_forward_pass(run, prepare):
    """A mean over those outputs that turn out to count; nothing may count on a worker."""
    model, optimizer, loader = ordinary(run, prepare)
    for inputs, targets in batches(run, loader):
        outputs = model(inputs)
        counted = outputs.detach() < targets + 0.2
        loader.weigh_by(counted.sum())
        optimizer.zero_grad()
        (((outputs - targets)[counted] ** 2).sum() / counted.sum().clamp(min=1)).backward()
        optimizer.step()
    return weights(model)


def sum_the_loss(run, prepare):
    """The documented form of a loss that is a sum over the union batch."""
    model, optimizer, loader = ordinary(run, prepare)
    for inputs, targets in batches(run, loader):
        total = mse_loss(model(inputs), targets, reduction="sum")
        length = loader.slice_length if isinstance(loader, PlainLoader) else int(loader.current.sizes.sum())
        optimizer.zero_grad()
        (total / len(inputs) * length / GLOBAL_BATCH).backward()
        optimizer.step()
    return weights(model)


# Around the step.


def schedule_and_average(run, prepare):
    """Rates by iteration, by epoch and by a metric; an average of the weights; early stopping; evaluation on one."""
    model = model_of(run)
    optimizer = training.optimizer_of(run, model)
    by_iteration = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=run.epochs * 6)
    model, optimizer, loader = prepare(model, optimizer, loader_of(run))
    by_metric = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    averaged = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    losses = []
    for _ in range(run.epochs):
        total, count = 0.0, 0
        for inputs, targets in loader:
            loss = mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            by_iteration.step()
            averaged.update_parameters(model.module)
            mine = len(inputs) if isinstance(loader, PlainLoader) else loader.current.samples
            total += loss.item() * mine if mine else 0.0
            count += mine
        mean = total / max(count, 1)
        losses.append(loader.mean_over_workers(mean, count))
        both = torch.tensor([mean, 7.0], dtype=torch.float64)
        assert loader.mean_over_workers(both, count).tolist() == pytest.approx([losses[-1], 7.0], abs=1e-12)
        by_metric.step(losses[-1])
        if not dist.is_initialized() or dist.get_rank() == 0:
            evaluate(run, model)
        if losses[-1] < 0.1:
            break
    return weights(model) + weights(averaged.module) + losses + [optimizer.param_groups[0]["lr"]]


@torch.no_grad()
def evaluate(run, model):
    """With an ordinary loader, on this worker alone, over a model with buffers or without."""
    model.eval()
    for inputs, _ in loader_of(run, shuffle=False):
        model(inputs)
    model.train()


EXACT = (
    loop_in_join,
    step_in_inner_loops,
    clip_the_norm,
    accumulate_in_no_sync,
    accumulate_and_weigh,
    accumulate_and_weigh_alike,
    accumulate_and_synchronise_each,
    count_nothing_after_a_sum,
    normalise_over_all_and_synchronise_each,
    accumulate_by_the_flag,
    accumulate_in_views_of_buckets,
    add_up_losses,
    backward_twice,
    keep_gradients_of_the_last_iteration,
    add_gradients_of_two_losses_by_hand,
    change_the_memory_format,
    embed_with_sparse_gradients,
    adversaries,
    two_models_one_backward,
    two_optimizers_one_model,
    freeze_a_layer,
    freeze_a_layer_later,
    leave_parameters_unused,
    a_static_graph,
    pickle_ones_own_ddp,
    checkpoint_activations,
    penalise_gradients,
    compose_a_hook,
    step_with_a_closure,
    accumulate_into_a_closure,
    step_between_loops,
    train_in_eval_mode,
    scale_the_loss,
    scale_for_a_fused_optimizer,
    overflow_everywhere,
    scale_and_accumulate,
    normalise_batches,
    count_after_the_forward_pass,
    sum_the_loss,
    schedule_and_average,
)
"""Those that come to the numbers of one process, to 1e-10."""

ROUNDED = {autocast_to_bfloat16: 0.02, compress_to_float16: 0.005}
"""Those that come to them within what they round, and how far off that may be."""


# Mistakes.


def leave_the_last_backward_in_no_sync(run, prepare):
    model, optimizer, loader = ordinary(run, prepare)
    for inputs, targets in loader:
        with model.no_sync():
            mse_loss(model(inputs), targets).backward()
        optimizer.step()


def go_backward_twice_over_one_forward_pass(run, prepare):
    model, optimizer, loader = ordinary(run, prepare)
    for inputs, targets in loader:
        outputs = model(inputs)
        mse_loss(outputs, targets).backward(retain_graph=True)
        outputs.abs().mean().backward()
        optimizer.step()


def go_past_the_prepared_model(run, prepare):
    model, optimizer, loader = ordinary(run, prepare)
    for inputs, targets in loader:
        mse_loss(model.module(inputs), targets).backward()
        optimizer.step()


def leave_parameters_unused_without_saying_so(run, prepare):
    model, optimizer, loader = ordinary(run, prepare, Branches(run))
    for inputs, targets in loader:
        mse_loss(model(inputs, 0), targets).backward()
        optimizer.step()


def thaw_a_layer(run, prepare):
    model = model_of(run)
    model[0].requires_grad_(False)
    model, optimizer, loader = ordinary(run, prepare, model)
    model.module[0].requires_grad_(True)
    for inputs, targets in loader:
        training.step(model, optimizer, inputs, targets)


def count_nothing_for_a_mean(run, prepare):
    _, _, loader = ordinary(run, prepare)
    loader.mean_over_workers(0.5, 0)


def count_less_than_nothing_for_a_mean(run, prepare):
    _, _, loader = ordinary(run, prepare)
    loader.mean_over_workers(0.5, -1)


def mean_of_each_sample(run, prepare):
    _, _, loader = ordinary(run, prepare)
    loader.mean_over_workers(torch.zeros(4 + dist.get_rank()), 4)


def learn_a_scale_of_the_loss(run, prepare):
    """A parameter of the loss, which the optimizer has and the model has not."""
    scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    model = model_of(run)
    model, optimizer, loader = prepare(model, torch.optim.SGD([*model.parameters(), scale], lr=0.05), loader_of(run))
    for inputs, targets in loader:
        mse_loss(model(inputs) * scale, targets).backward()
        optimizer.step()


def add_a_layer(run, prepare):
    module = model_of(run)
    model, optimizer, loader = prepare(module, sgd(module), loader_of(run))
    module.append(torch.nn.Linear(1, 1, dtype=torch.float64))
    optimizer.add_param_group({"params": module[-1].parameters()})
    for inputs, targets in loader:
        mse_loss(model(inputs), targets).backward()
        optimizer.step()


def follow_a_metric_of_ones_own(run, prepare):
    """A learning rate that each worker lowers by a loss of its own."""
    model, optimizer, loader = ordinary(run, prepare)
    for inputs, targets in loader:
        training.step(model, optimizer, inputs, targets)
        if dist.get_rank() == 2:
            optimizer.param_groups[0]["lr"] *= 0.5


def learn_a_scale_by_another_optimizer(run, prepare):
    model, optimizer, loader = ordinary(run, prepare)
    scale = torch.nn.Parameter(torch.ones(1, dtype=run.dtype))
    other = torch.optim.SGD([scale], lr=0.1)
    for inputs, targets in loader:
        optimizer.zero_grad()
        other.zero_grad()
        mse_loss(model(inputs) * scale, targets).backward()
        optimizer.step()
        other.step()


def step_in_backward(run, prepare):
    """An optimizer for each parameter steps as soon as its gradient is there."""
    model, _, loader = ordinary(run, prepare)
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    for inputs, targets in loader:
        mse_loss(model(inputs), targets).backward()


class Wrapping(torch.optim.Optimizer):
    """An optimizer around another one, as papers' repositories write it."""

    def __init__(self, inner):
        self.param_groups, self.state, self.step = inner.param_groups, inner.state, inner.step


def wrap_without_init(run, prepare):
    model = model_of(run)
    prepare(model, Wrapping(sgd(model)), loader_of(run))


def search_along_lines(run, prepare):
    model = model_of(run)
    prepare(model, torch.optim.LBFGS(model.parameters()), loader_of(run))


def ignore_a_gradient(run, prepare):
    model = model_of(run)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.bias"])
    ordinary(run, prepare, model)


def synchronise_batch_norm_on_the_cpu(run, prepare):
    ordinary(run, prepare, torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(FEATURES)))


MISTAKES = {
    leave_the_last_backward_in_no_sync: "leave no_sync for the last forward and backward of a step",
    go_backward_twice_over_one_forward_pass: "add losses up that rest on one forward pass",
    go_past_the_prepared_model: "call the model that prepare returned (not its .module)",
    leave_parameters_unused_without_saying_so: "heads.1.weight, heads.1.bias, heads.2.weight and 1 more got no",
    learn_a_scale_of_the_loss: "steps on 1 parameters that the model did not have when it was prepared",
    add_a_layer: "steps on 2 parameters that the model did not have when it was prepared",
    thaw_a_layer: "the gradient of 0.weight, 0.bias is not summed",
    follow_a_metric_of_ones_own: "worker 2 has a learning rate of 0.025 in iteration 1 where the others have 0.05: give"
    " all the same (one that follows a metric must follow loader.mean_over_workers)",
    count_nothing_for_a_mean: "counted nothing",
    mean_of_each_sample: "takes values of one shape on all workers, here [",
    count_less_than_nothing_for_a_mean: "counts >= 0, not -1.0",
    learn_a_scale_by_another_optimizer: "steps on 1 parameters that the model did not have when it was prepared",
    step_in_backward: "were not summed over the workers",
    wrap_without_init: "give prepare the optimizer that it is around",
    search_along_lines: "LBFGS calls its closure as often as this worker's own loss tells it to",
    ignore_a_gradient: "is told not to sum the gradient of 2.bias",
    synchronise_batch_norm_on_the_cpu: "works on GPUs alone",
}
"""Each with what the error says, on every worker and before any weight has changed."""
