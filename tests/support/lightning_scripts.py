"""More habits of Lightning scripts, in the form of lightning_habits: callbacks, tuners and odd Trainers."""

import os

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from support import training
from support.lightning_habits import GLOBAL_BATCH, RUN, Alone, Logging, Manual, Module, Validating, fitted, loader_of


class Saving(Callback):
    """Saves in the middle of epochs, from a hook of its own."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step in (2, 5):
            trainer.save_checkpoint(os.path.join(self.folder, f"saving-{trainer.global_step}.ckpt"))


def save_from_a_callback(world):
    module = Module()
    fitted(world, module, callbacks=[Saving(world.folder)])
    return {"weights": module.weights}


def clip_by_value(world):
    module = Module()
    fitted(world, module, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    return {"weights": module.weights}


def average_weights(world):
    module = Module()
    fitted(world, module, max_epochs=4, callbacks=[StochasticWeightAveraging(swa_lrs=0.02, swa_epoch_start=2)])
    return {"weights": module.weights}


def average_exponentially(world):
    module = Module()
    fitted(world, module, callbacks=[EMAWeightAveraging(decay=0.9)])
    return {"weights": module.weights}


def limit_by_a_fraction(world):
    module = Module()
    fitted(world, module, limit_train_batches=0.5, max_epochs=3)
    return {"weights": module.weights}


def overfit(world):
    module, loader = Module(), loader_of(shuffle=False)
    if isinstance(world, Alone):
        loader = DataLoader(loader.dataset, batch_size=GLOBAL_BATCH)
    world.trainer(overfit_batches=2, max_epochs=3).fit(module, loader)
    return {"weights": module.weights}


def check_sanity(world):
    module = Validating()
    others = loader_of(training.Run(samples=24, batch_size=2), shuffle=False)
    trainer = world.trainer(max_epochs=RUN.epochs, num_sanity_val_steps=2)
    trainer.fit(module, world.loader(loader_of()), others)
    return {"weights": module.weights, "validated": module.validated[1:]}


def run_fast(world):
    module = Module()
    fitted(world, module, fast_dev_run=3)
    return {"weights": module.weights}


def schedule_the_accumulation(world):
    module = Module()
    fitted(world, module, callbacks=[GradientAccumulationScheduler(scheduling={0: 2, 1: 3})])
    return {"weights": module.weights}


class Unseen(Module):
    def loss(self, batch):
        return mse_loss(self.model(batch[0]), batch[1])


def compile_the_module(world):
    module = Unseen()
    fitted(world, torch.compile(module, backend="eager"))
    return {"weights": module.weights}


class Predicting(Module):
    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])


def predict(world):
    """What this worker predicts after `fit`, in Lightning's own order."""
    module, together = Predicting(), not isinstance(world, Alone)
    trainer = fitted(world, module)
    made = torch.cat(trainer.predict(module, loader_of(training.Run(samples=24), shuffle=False)))
    if together:
        gathered = [torch.zeros_like(made) for _ in range(world.workers)]
        torch.distributed.all_gather(gathered, made)
        made = torch.stack(gathered, dim=1).flatten(0, 1)
    return {"weights": module.weights, "made": made.flatten().tolist()}


class Unused(Module):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(2, 2)


def leave_parameters_out(world):
    fitted(world, Unused())


class UnusedByHand(Manual):
    """Two backward passes, of which the first leaves the last layer's parameters out."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.model[0](batch[0]).square().mean())
        super().training_step(batch, batch_idx)


def leave_parameters_out_by_hand(world):
    fitted(world, UnusedByHand())


class Frozen(Module):
    def __init__(self):
        super().__init__()
        self.model[0].requires_grad_(False)


def freeze_a_layer(world):
    module = Frozen()
    fitted(world, module)
    return {"weights": module.weights}


class ByClosure(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


def step_with_a_closure(world):
    module = ByClosure()
    fitted(world, module)
    return {"weights": module.weights}


class TwoViews(Module):
    def training_step(self, batch, batch_idx):
        inputs, targets, _ = batch
        return mse_loss(self.model(inputs), targets) + mse_loss(self.model(-inputs), targets)


def two_views(world):
    module = TwoViews()
    fitted(world, module)
    return {"weights": module.weights}


class Stopping(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3:
            trainer.should_stop = True


def stop_within_an_epoch(world):
    module = Module()
    fitted(world, module, max_epochs=3, callbacks=[Stopping()])
    return {"weights": module.weights}


def profile(world):
    module = Module()
    fitted(world, module, profiler="simple", log_every_n_steps=1, detect_anomaly=True)
    return {"weights": module.weights}


class Plateau(Logging):
    """A schedule by what was logged, and steps that a hook leaves out."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss_epoch"}}

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if batch_idx % 3 == 1:
            optimizer_closure()  # Its gradients are thrown away by the next one.
        else:
            optimizer.step(closure=optimizer_closure)

    def configure_gradient_clipping(self, optimizer, **_):
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")


def schedule_by_what_is_logged(world):
    module = Plateau()
    trainer = fitted(world, module, max_epochs=4)
    return {"weights": module.weights, "rate": trainer.optimizers[0].param_groups[0]["lr"]}


def compute_much():
    if dist.get_rank() == 1:
        for _ in range(24):
            torch.linalg.svd(torch.ones(200, 200, dtype=torch.float64))


class Busy(Logging):
    """Logs a mean over the workers in each step, before which one of them computes much."""

    def training_step(self, batch, batch_idx):
        compute_much()
        return super().training_step(batch, batch_idx)


class Accumulating(Module):
    """One worker computes much; before each batch Lightning tells all workers whether worker 0 got a SIGTERM."""

    def training_step(self, batch, batch_idx):
        compute_much()
        return super().training_step(batch, batch_idx)


def log_beside_a_busy_worker(world):
    fitted(world, Busy(), asked={"run_dir": f"{world.folder}/busy"}, max_epochs=1)
    return {}


def accumulate_beside_a_busy_worker(world):
    asked = {"run_dir": f"{world.folder}/accumulating"}
    fitted(world, Accumulating(), asked=asked, accumulate_grad_batches=3, max_epochs=1)
    return {}


class Data(lightning.LightningDataModule):
    def __init__(self, world):
        super().__init__()
        self.world = world

    def train_dataloader(self):
        return self.world.loader(loader_of())

    def val_dataloader(self):
        return loader_of(training.Run(samples=24, batch_size=2), shuffle=False)


def data_module_and_best_checkpoint(world):
    """The best of two checkpoints, which `test` and `validate` find by themselves."""
    module, folder = Validating(), os.path.join(world.folder, f"best-{type(world).__name__}")
    best = ModelCheckpoint(dirpath=folder, filename="{step}", monitor="validation", mode="min", save_top_k=1)
    trainer = world.trainer(max_epochs=RUN.epochs, callbacks=[best])
    data = Data(world)
    trainer.fit(module, datamodule=data)
    (found,) = trainer.validate(module, datamodule=data, ckpt_path="best", verbose=False)
    return {"weights": module.weights, "validated": [*module.validated, found["validation"]]}


# Tuners.


class Rated(Module):
    def __init__(self):
        super().__init__()
        self.lr, self.batch_size = 0.05, RUN.batch_size

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self):
        return loader_of(training.Run(samples=77, batch_size=self.batch_size))


def find_the_rate(world):
    module = Rated()
    trainer = world.trainer(max_epochs=2, default_root_dir=world.folder)
    Tuner(trainer).lr_find(module, world.loader(loader_of()), num_training=16, min_lr=1e-3, max_lr=0.1)
    trainer.fit(module, world.loader(loader_of()))
    return {"weights": module.weights, "rate": module.lr}


def find_the_rate_by_callback(world):
    module = Rated()
    finder = LearningRateFinder(num_training_steps=16, min_lr=1e-3, max_lr=0.1)
    fitted(world, module, callbacks=[finder], default_root_dir=world.folder)
    return {"weights": module.weights}


def find_the_batch_size(world):
    module = Rated()
    trainer = world.trainer(max_epochs=2, default_root_dir=world.folder)
    Tuner(trainer).scale_batch_size(module, init_val=2, max_trials=2, steps_per_trial=2)
    trainer.fit(module)
    return {"weights": module.weights, "size": module.batch_size}


def find_the_batch_size_by_callback(world):
    module = Rated()
    trainer = world.trainer(
        max_epochs=2,
        default_root_dir=world.folder,
        callbacks=[BatchSizeFinder(init_val=2, max_trials=2, steps_per_trial=2)],
    )
    trainer.fit(module)
    return {"weights": module.weights, "size": module.batch_size}


def combine_loaders(world):
    module = Module()
    fitted(world, module, CombinedLoader({"one": loader_of(), "other": loader_of()}, "max_size"))
    return {"weights": module.weights}


EXACT = [
    save_from_a_callback,
    clip_by_value,
    average_weights,
    average_exponentially,
    limit_by_a_fraction,
    overfit,
    check_sanity,
    run_fast,
    schedule_the_accumulation,
    compile_the_module,
    predict,
    freeze_a_layer,
    step_with_a_closure,
    two_views,
    stop_within_an_epoch,
    profile,
    find_the_rate,
    find_the_rate_by_callback,
    schedule_by_what_is_logged,
    data_module_and_best_checkpoint,
]

MISTAKES = {
    find_the_batch_size: "currently not supported with distributed strategies",
    find_the_batch_size_by_callback: "not supported with distributed strategies",
    combine_loaders: "has 2 loaders",
    leave_parameters_out: "EvenstepStrategy(find_unused_parameters=True)",
    leave_parameters_out_by_hand: "EvenstepStrategy(find_unused_parameters=True)",
}
"""What Lightning itself refuses under its strategies for several workers, and what evenstep does."""
