"""Habits of Lightning scripts whose workers compute different numbers of whole batches for a step."""

import os
from dataclasses import replace

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.nn.functional import mse_loss

from support import training
from support.lightning_habits import (
    WORKERS,
    Alone,
    GlobalBatches,
    Later,
    Logging,
    Module,
    OneCycle,
    Validating,
    loader_of,
)
from support.told_speeds import told

WINDOW = 5
RUN = training.Run(samples=200, batch_size=2, epochs=2)
STEP = WORKERS * RUN.batch_size * WINDOW


def windowed(world, module, asked=None, run=RUN, ckpt_path=None, others=None, **options):
    """Train on steps of several batches; alone, on whole steps at once."""
    loader, alone = loader_of(run), isinstance(world, Alone)
    accumulation = {} if alone else {"accumulate_grad_batches": WINDOW}
    trainer = world.trainer(asked, **{"max_epochs": RUN.epochs, **accumulation, **options})
    trainer.fit(module, GlobalBatches(loader, STEP) if alone else loader, others, ckpt_path=ckpt_path)
    assert alone or max(map(len, module.seen), default=0) <= RUN.batch_size
    return trainer


def accumulate_whole_batches(world):
    """By default, and for any numbers of batches."""
    module = OneCycle()
    trainer = windowed(world, module, gradient_clip_val=0.5, max_time={"hours": 1})
    assert isinstance(world, Alone) or trainer.num_training_batches == 7 * WINDOW
    return {"weights": module.weights, "steps": [trainer.global_step, trainer.estimated_stepping_batches]}


def accumulate_as_measured(world):
    module = Module()
    windowed(world, module, asked={"scheme": "lb-bsp"})
    return {"weights": module.weights}


class Tokens(Module):
    """A mean over tokens, of which samples have different numbers."""

    def training_step(self, batch, batch_idx):
        inputs, targets, keys = batch
        tokens = 1 + keys % 4
        self.seen.append(keys.tolist())
        if not isinstance(self.trainer.train_dataloader, GlobalBatches):
            self.trainer.train_dataloader.weigh_by(int(tokens.sum()))
        losses = mse_loss(self.model(inputs), targets, reduction="none").mean(dim=1)
        return {"loss": (losses * tokens).sum() / tokens.sum()}


def weigh_whole_batches_by_tokens(world):
    module = Tokens()
    windowed(world, module)
    return {"weights": module.weights}


class LoggingMore(Logging):
    def training_step(self, batch, batch_idx):
        self.log("largest", batch[2].double().max(), on_step=True, on_epoch=False, sync_dist=True, reduce_fx="max")
        return super().training_step(batch, batch_idx)


class AtSteps(Later):
    """What was logged, of each step and of each epoch."""

    def on_train_batch_end(self, trainer, *_):
        if not trainer.fit_loop._should_accumulate():
            logged = trainer.callback_metrics
            self.batches.append([logged[name].item() for name in ("loss_step", "count", "largest")])


def log_of_whole_batches(world):
    """In steps and by sizes that leave no sample alone, which would be in its batch twice."""
    module, logged, run = LoggingMore(), AtSteps(), replace(RUN, samples=7 * STEP)
    asked = {"whole_batches": True, "scheme": told("lb-bsp", [4, 4, 1])}
    windowed(world, module, asked=asked, run=run, callbacks=[logged])
    return {"weights": module.weights, "batches": logged.batches, "epochs": logged.epochs}


def validate_within_a_step(world):
    """After three batches of five, where no weight has changed."""
    module = Validating()
    others = loader_of(training.Run(samples=24, batch_size=2), shuffle=False)
    interval = {} if isinstance(world, Alone) else {"val_check_interval": 3 * WINDOW + 3}
    windowed(world, module, others=others, **interval)
    return {"weights": module.weights}


class Transferring(Module):
    """Changes batches in place on their way to the device."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0].mul_(0.5), *batch[1:]] if self.trainer.training else batch


def transfer_whole_batches(world):
    module = Transferring()
    windowed(world, module)
    return {"weights": module.weights}


class Hooked(Module):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert len(batch[2]) == len(self.seen[-1])


def look_into_batches(world):
    """Each batch is then divided, as Lightning accumulates in one process: a short last step has a lower weight."""
    module, alone, loader = Hooked(), isinstance(world, Alone), loader_of(RUN)
    trainer = world.trainer(max_epochs=RUN.epochs, accumulate_grad_batches=WINDOW)
    trainer.fit(module, GlobalBatches(loader, WORKERS * RUN.batch_size) if alone else loader)
    return {"weights": module.weights}


class Saving(Callback):
    """Saves after a step, and within the next."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx + 1 in (2 * WINDOW, 2 * WINDOW + 2, 3 * WINDOW - 1) and trainer.current_epoch == 1:
            trainer.save_checkpoint(os.path.join(self.folder, f"windows-{batch_idx + 1}.ckpt"))


def resume_whole_batches(world):
    if isinstance(world, Alone):
        module = Module()
        windowed(world, module)
        return {"weights": module.weights * 3}
    windowed(world, Module(), asked={"whole_batches": True}, callbacks=[Saving(world.folder)])
    found = []
    for number in (2 * WINDOW, 2 * WINDOW + 2, 3 * WINDOW - 1):
        module = Module()
        trainer = windowed(world, module, ckpt_path=os.path.join(world.folder, f"windows-{number}.ckpt"))
        assert trainer.global_step == 14
        found += module.weights
    return {"weights": found}


EXACT = [
    accumulate_whole_batches,
    accumulate_as_measured,
    weigh_whole_batches_by_tokens,
    log_of_whole_batches,
    validate_within_a_step,
    transfer_whole_batches,
    look_into_batches,
    resume_whole_batches,
]


# Mistakes.


def limit_whole_batches(world):
    windowed(world, Module(), asked={"whole_batches": True}, limit_train_batches=WINDOW + 1)


class Gathering(Module):
    def training_step(self, batch, batch_idx):
        dist.all_reduce(torch.ones(()))
        return self.loss(batch)


def communicate_in_whole_batches(world):
    windowed(world, Gathering(), asked={"scheme": "bsp"})


def resume_whole_batches_as_divided(world):
    asked = {"whole_batches": False}
    windowed(world, Module(), asked=asked, ckpt_path=os.path.join(world.folder, f"windows-{2 * WINDOW}.ckpt"))


class Changing(Callback):
    def on_train_epoch_start(self, trainer, module):
        trainer.accumulate_grad_batches = WINDOW - trainer.current_epoch


def accumulate_other_numbers(world):
    windowed(world, Module(), callbacks=[Changing()])


def say_how_many_accumulate(world):
    windowed(world, Module(), asked={"accumulation": 5})


MISTAKES = {
    limit_whole_batches: "whole_batches=True does not go with",
    accumulate_other_numbers: "accumulate_grad_batches is 4 now and was 5",
    communicate_in_whole_batches: "workers meet here between two batches of a step",
    resume_whole_batches_as_divided: "saved with 5 whole batches of a worker in a step",
    say_how_many_accumulate: "the Trainer has accumulate_grad_batches",
}
