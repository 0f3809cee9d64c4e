"""More scripts for Hugging Face Accelerate, in the form of accelerate_habits: those of its examples, and odd loops."""

import contextlib
import importlib.util
import math
import os
import tempfile
import warnings
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, find_executable_batch_size
from torch.nn.functional import cross_entropy, mse_loss

from support import training
from support.accelerate_habits import BATCH, WORKERS, Lists, loader_of, parts, train, trained
from support.training import model_of, weights

# As in the examples of Accelerate, by_feature.


class Speaker(torch.nn.Module):
    """A model that divides its loss by a number of tokens, as those of Transformers do."""

    def __init__(self, run):
        super().__init__()
        self.layer = torch.nn.Linear(training.FEATURES, 4).to(run.dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(0.1)

    def forward(self, inputs, labels, num_items_in_batch=None):
        return cross_entropy(self.layer(inputs), labels, reduction="sum") / num_items_in_batch


def accumulate_tokens(run, make, batch):
    """Its gradient_accumulation_for_autoregressive_models.py, with another model and other data."""
    script = {"weights": "script"} if dist.is_initialized() else {}
    steps = 2
    accelerator = make(gradient_accumulation_steps=steps, **script)
    inputs, targets = training.data(run)
    labels = (10 * targets.flatten()).long() % 4
    labels[::5] = -100
    rows = [{"inputs": x, "labels": label} for x, label in zip(inputs, labels, strict=True)]
    model = Speaker(run)
    optimizer = training.optimizer_of(run, model)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    loader = torch.utils.data.DataLoader(rows, shuffle=False, batch_size=batch)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    remainder = len(loader) % steps or steps
    updates = math.ceil(len(loader) / steps)
    logged = []
    for _ in range(run.epochs):
        model.train()
        batches = iter(loader)
        for update in range(updates):
            window = [next(batches) for _ in range(steps if update != updates - 1 else remainder)]
            count = accelerator.gather(sum((each["labels"].ne(-100)).sum() for each in window)).sum().item()
            losses = []
            for number, each in enumerate(window):
                alone = number < len(window) - 1 and accelerator.num_processes > 1
                with model.no_sync() if alone else contextlib.nullcontext():
                    loss = model(**each, num_items_in_batch=count) * steps * accelerator.num_processes
                    accelerator.backward(loss)
                    losses.append(loss.detach())
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total = accelerator.gather(sum(losses)).sum().item() / (accelerator.num_processes * steps)
            logged += [total, norm.item()]
    return [*weights(model), *logged]


def stop_by_a_trigger(run, make, batch):
    """Its early_stopping.py: one process asks all to stop."""
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    model.train()
    for number, (inputs, targets) in enumerate(loader):
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        if number == 2 and accelerator.is_main_process:
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    return [*weights(model), number]


def search_the_batch_size(run, make, batch):
    """Its memory.py: the first size is too large, which only the second batch shows."""
    accelerator = make()

    @find_executable_batch_size(starting_batch_size=2 * batch, reduce_batch_size_fn=lambda: batch)
    def inner(size):
        accelerator.free_memory()
        model, optimizer, loader = accelerator.prepare(*parts(run, size))
        model.train()
        for number, (inputs, targets) in enumerate(loader):
            if size > batch and number == 1:
                raise RuntimeError("CUDA out of memory.")
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    return inner()


def profile_the_steps(run, make, batch):
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    with accelerator.profile(), accelerator.autocast():
        train(accelerator, model, optimizer, loader)
    return weights(model)


def track(run, make, batch):
    """Its tracking.py, with Weights & Biases offline, where that is installed."""
    with tempfile.TemporaryDirectory() as folder:
        known = importlib.util.find_spec("wandb") is not None and dist.is_initialized()
        if known:  # In a worker, that is, whose environment ends with it.
            os.environ.update(WANDB_X_SERVICE_WAIT="300", WANDB_INIT_TIMEOUT="300")  # Of a busy machine.
        accelerator = make(log_with="wandb" if known else None, project_dir=folder)
        settings = {"dir": folder, "mode": "offline", "settings": {"silent": True, "console": "off"}}
        accelerator.init_trackers("a project", {"batch": batch}, {"wandb": settings} if known else {})
        model, optimizer, loader = accelerator.prepare(*parts(run, batch))
        for epoch in range(run.epochs):
            model.train()
            total = 0.0
            for inputs, targets in loader:
                loss = mse_loss(model(inputs), targets)
                total += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.log({"train_loss": total.item(), "epoch": epoch}, step=epoch)
        for each in accelerator.trackers:  # As `end_training`, which also ends the process group of other scripts.
            each.finish()
        if known and accelerator.is_main_process:
            import wandb

            wandb.teardown()  # Its process writes the file, and has ended then.
            (path,) = Path(folder).glob("wandb/offline-run-*/run-*.wandb")
            assert b"train_loss" in path.read_bytes()
        return weights(model)


# Odd loops.


def leave_within_a_window(run, make, batch):
    """The gradients of the rest of a window stay, and count in the next loop."""
    accelerator = make(gradient_accumulation_steps=3)
    model, optimizer, loader = accelerator.prepare(*parts(run, batch, shuffle=False))
    for batches in (4, 2, 100):
        train(accelerator, model, optimizer, islice(loader, batches))
    return weights(model)


def accumulate_over_the_end(run, make, batch):
    plugin = GradientAccumulationPlugin(num_steps=4, sync_with_dataloader=False)
    return trained(run, make(gradient_accumulation_plugin=plugin), *parts(run, batch))


def sum_in_each_batch(run, make, batch):
    plugin = GradientAccumulationPlugin(num_steps=4, sync_each_batch=True)
    return trained(run, make(gradient_accumulation_plugin=plugin), *parts(run, batch))


def train_two_models(run, make, batch):
    """Each with an optimizer, in turns on the same batch; one judges what the other makes."""
    accelerator = make()
    maker, judge = model_of(run), torch.nn.Linear(1, 1).to(run.dtype)
    torch.nn.init.constant_(judge.weight, 0.5)
    torch.nn.init.constant_(judge.bias, 0.1)
    optimizers = [training.optimizer_of(run, each) for each in (maker, judge)]
    maker, judge, first, second, loader = accelerator.prepare(maker, judge, *optimizers, loader_of(run, batch))
    for _ in range(run.epochs):
        maker.train()
        judge.train()
        for inputs, targets in loader:
            made = maker(inputs)
            accelerator.backward(mse_loss(judge(made.detach()), targets))
            second.step()
            second.zero_grad()
            accelerator.backward(mse_loss(judge(made), targets) + mse_loss(made, targets))
            first.step()
            first.zero_grad()
            second.zero_grad()
    return [*weights(maker), *weights(judge)]


def keep_the_batches_uneven(run, make, batch):
    accelerator = make(dataloader_config=DataLoaderConfiguration(even_batches=False))
    return trained(run, accelerator, *parts(run, batch))


def split_lists(run, make, batch):
    accelerator = make(dataloader_config=DataLoaderConfiguration(split_batches=True, even_batches=False))
    return trained(run, accelerator, *parts(run, batch, batch_sampler=Lists(run.samples, WORKERS * BATCH)))


def clip_by_value(run, make, batch):
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    model.train()
    for inputs, targets in loader:
        accelerator.backward(mse_loss(model(inputs), targets))
        accelerator.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def two_loaders_at_once(run, make, batch):
    """As where a loss is added up from two sets of data."""
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    other = accelerator.prepare(loader_of(run, batch, shuffle=False))
    model.train()
    for (inputs, targets), (further, known) in zip(loader, other, strict=True):
        loss = mse_loss(model(inputs), targets) + mse_loss(model(further), known)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def count_steps(run, make, batch):
    """A loop over steps, which begins the loader again where it ends."""
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch, shuffle=False))
    model.train()
    batches = iter(loader)
    for _ in range(9):
        try:
            inputs, targets = next(batches)
        except StopIteration:
            batches = iter(loader)
            inputs, targets = next(batches)
        accelerator.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def two_views(run, make, batch):
    """Two forward passes on each batch, and one backward."""
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    model.train()
    for inputs, targets in loader:
        accelerator.backward(mse_loss(model(inputs), targets) + mse_loss(model(-inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def forget_to_evaluate(run, make, batch):
    """The loop that judges runs while the model is in training mode."""
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    judged = accelerator.prepare(loader_of(run, batch, shuffle=False))
    losses = []
    for _ in range(run.epochs):
        train(accelerator, model, optimizer, loader)
        found = []
        for inputs, targets in judged:
            with torch.no_grad():
                found.append(accelerator.gather_for_metrics((model(inputs) - targets) ** 2))
        assert len(torch.cat(found)) == run.samples
        losses.append(float(torch.cat(found).mean()))
    return [*weights(model), *losses]


def fetch_in_processes(run, make, batch):
    return trained(run, make(), *parts(run, batch, num_workers=1, persistent_workers=True))


def join_uneven_inputs(run, make, batch):
    """For batches that Accelerate would hand out unevenly."""
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    model.train()
    with accelerator.join_uneven_inputs([model]) if accelerator.num_processes > 1 else contextlib.nullcontext():
        for inputs, targets in loader:
            accelerator.backward(mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def train_the_inner_model(run, make, batch):
    """Past DistributedDataParallel, so that no gradient is summed."""
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    model.train()
    inner = accelerator.unwrap_model(model)
    for inputs, targets in loader:
        accelerator.backward(mse_loss(inner(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def step_with_a_closure(run, make, batch):
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch))
    model.train()
    for inputs, targets in loader:

        def closure():
            optimizer.zero_grad()
            loss = mse_loss(model(inputs), targets)  # noqa: B023
            accelerator.backward(loss)
            return loss

        optimizer.step(closure)
    return weights(model)


def skip_without_a_checkpoint(run, make, batch):
    accelerator = make()
    model, optimizer, loader = accelerator.prepare(*parts(run, batch, shuffle=False))
    train(accelerator, model, optimizer, accelerator.skip_first_batches(loader, 2))
    train(accelerator, model, optimizer, loader)
    return weights(model)


# Checkpoints for another number of workers.


class Saved:
    """Some workers save in the middle of the second epoch, and others continue: `not_resumed`, all in all."""

    STEPS = 4

    def __init__(self, folder, *, continues):
        self.folder, self.continues = folder, continues
        self.__name__ = "continue_elsewhere" if continues else "save_for_others"

    def __call__(self, run, make, batch):
        accelerator = make()
        model, optimizer, loader = accelerator.prepare(*parts(run, batch))
        if not self.continues:
            train(accelerator, model, optimizer, loader)
            train(accelerator, model, optimizer, islice(loader, self.STEPS))
            accelerator.save_state(self.folder)
            return []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The global batch size of the checkpoint replaces that of two workers.
            accelerator.load_state(self.folder)
            train(accelerator, model, optimizer, accelerator.skip_first_batches(loader, self.STEPS))
        train(accelerator, model, optimizer, loader)
        return weights(model)


EXACT = (
    accumulate_tokens,
    stop_by_a_trigger,
    search_the_batch_size,
    profile_the_steps,
    leave_within_a_window,
    accumulate_over_the_end,
    sum_in_each_batch,
    train_two_models,
    keep_the_batches_uneven,
    split_lists,
    clip_by_value,
    count_steps,
    two_views,
    forget_to_evaluate,
    fetch_in_processes,
    step_with_a_closure,
    skip_without_a_checkpoint,
    join_uneven_inputs,
    track,
)
"""Those that come to the numbers of one process, to 1e-10."""

MISTAKES = {
    two_loaders_at_once: "fetch a batch after the backward of the last one",
    train_the_inner_model: "call the model that prepare returned",
}
