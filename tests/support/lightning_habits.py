"""Habits of Lightning scripts, each written once and run twice: with evenstep on several workers, and without.

A habit is a function of a world, in which it trains with a Trainer or with Fabric; it returns numbers to compare.
Without evenstep, one process trains on whole global batches, in plain Lightning.
"""

import os
import warnings
from itertools import chain

import lightning
import torch
import torch.distributed as dist
import torchmetrics
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset, WeightedRandomSampler

import evenstep
from evenstep.core.samples import Ledger
from evenstep.integrations.lightning import EvenstepFabricStrategy, EvenstepStrategy
from evenstep.schemes import Scheme
from evenstep.testing.scripted import Scripted
from evenstep.torch.data.randomness import seeded_randomness
from support import training

WORKERS = 3
RUN = training.Run(samples=77, epochs=2)
SEED = 0
GLOBAL_BATCH = WORKERS * RUN.batch_size
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def loader_of(run=RUN, **options):
    dataset = TensorDataset(*training.data(run), torch.arange(run.samples))
    return DataLoader(dataset, batch_size=run.batch_size, **{"shuffle": True, **options})


class GlobalBatches:
    """Whole global batches of the samples of a loader, in the documented order."""

    def __init__(self, loader, size=GLOBAL_BATCH):
        self.loader, self.size = loader, size
        self.sampler = self
        self.epoch = 0
        self.lists = None if loader.batch_size is not None else loader.batch_sampler

    def set_epoch(self, epoch):
        self.epoch = epoch

    @property
    def ledger(self):
        return Ledger(length=len(self.loader.sampler), global_batch_size=self.size, even=True)

    def __len__(self):
        return self.ledger.iterations if self.lists is None else len(self.lists)

    def __iter__(self):
        for part in self.parts() if self.lists is None else self.lists:
            yield self.loader.collate_fn([self.loader.dataset[each] for each in part])

    def parts(self):
        ledger = self.ledger
        if isinstance(self.loader.sampler, RandomSampler | DistributedSampler):
            order = torch.randperm(ledger.length, generator=torch.Generator().manual_seed(SEED + self.epoch)).tolist()
        else:
            with seeded_randomness(SEED, self.epoch):
                order = list(self.loader.sampler)
        while (part := ledger.slice(ledger.iteration)) is not None:
            ledger.iteration += 1
            yield order[part.start : part.stop]


class Together:
    """Several workers, with evenstep; by default with sizes that always change."""

    def __init__(self, folder):
        self.folder = folder
        rank, self.workers = dist.get_rank(), dist.get_world_size()
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.workers, "GROUP_RANK": 0}
        os.environ.update({name: str(value) for name, value in names.items()}, TORCHELASTIC_RUN_ID="tests")

    def options(self, strategy, scheme="scripted", **options):
        if scheme == "scripted":
            scheme = Scheme(name="scripted", load=Scripted(seed=11))
        return {"devices": self.workers, "strategy": strategy(scheme, timeout=20.0, **options)}

    def trainer(self, asked=None, **options):
        return lightning.Trainer(**{**QUIET, **self.options(EvenstepStrategy, **(asked or {})), **checkpoints(options)})

    def fabric(self, **asked):
        fabric = lightning.Fabric(accelerator="cpu", **self.options(EvenstepFabricStrategy, **asked))
        fabric.launch()
        return fabric

    def loader(self, loader):
        return loader

    def set_up(self, fabric, loader):
        return fabric.setup_dataloaders(loader)


class OnNodes(Together):
    """Each worker on a node of its own, as far as Lightning knows, which makes the process group."""

    def __init__(self, folder):
        self.folder, self.workers = folder, int(os.environ["WORLD_SIZE"])
        names = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
        os.environ.update(names, TORCHELASTIC_RUN_ID="tests")

    def options(self, strategy, scheme="scripted", **options):
        return {**super().options(strategy, scheme, **options), "devices": 1, "num_nodes": self.workers}


class Alone:
    """One process, without evenstep, on whole global batches."""

    def __init__(self, folder):
        self.folder = folder

    def trainer(self, asked=None, **options):
        return lightning.Trainer(**{**QUIET, **checkpoints(options), "strategy": "auto", "devices": 1})

    def fabric(self, **asked):
        return lightning.Fabric(accelerator="cpu", devices=1)

    def loader(self, loader):
        return GlobalBatches(loader)

    def set_up(self, fabric, loader):
        return Epochs(GlobalBatches(loader))


class Epochs:
    """Counts epochs for its loader, as Fabric does."""

    def __init__(self, loader):
        self.loader = loader
        self.epoch = 0

    def __iter__(self):
        _set_sampler_epoch(self.loader, self.epoch)
        self.epoch += 1
        return iter(self.loader)


def checkpoints(options):
    return {
        "enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in options.get("callbacks", []))
    } | options


def come_to(world, habits, folder):
    """What each habit comes to; an error is text."""
    torch.set_default_dtype(torch.float64)
    here = world(folder)
    return {habit.__name__: attempt(habit, here) for habit in habits}


def attempt(habit, world):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", PossibleUserWarning)  # Of speed, which tests do not need.
            warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.` is deprecated", FutureWarning)
            warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks", UserWarning)
            return habit(world)
    except evenstep.EvenstepError as error:
        return f"{type(error).__name__}: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error} (of {error.__cause__ or error.__context__!r})"


def come_to_on_nodes(habits, folder):
    """What each habit comes to on several nodes."""
    found = come_to(OnNodes, habits, folder)
    dist.barrier()
    dist.destroy_process_group()
    return found


class Module(lightning.LightningModule):
    """The model of the other tests. `seen` has the keys of the samples of each batch."""

    def __init__(self, run=RUN):
        super().__init__()
        self.run = run
        self.model = training.model_of(run)
        self.seen = []

    def loss(self, batch):
        inputs, targets, keys = batch
        self.seen.append(keys.tolist())
        return mse_loss(self.model(inputs), targets)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return training.optimizer_of(self.run, self.model)

    @property
    def weights(self):
        return training.weights(self.model)


def fitted(world, module, loader=None, asked=None, **options):
    trainer = world.trainer(asked, **{"max_epochs": RUN.epochs, **options})
    trainer.fit(module, world.loader(loader_of() if loader is None else loader))
    return trainer


# The habits.


def automatic(world):
    module = Module()
    fitted(world, module)
    return {"weights": module.weights, "seen": module.seen}


def named(world):
    """The strategy by its name, with the scheme that nothing was said about."""
    module = Module()
    trainer = fitted(world, module, strategy="evenstep")
    assert isinstance(world, Alone) or type(trainer.strategy) is EvenstepStrategy
    return {"weights": module.weights}


class Manual(Module):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()


def manual(world):
    module = Manual()
    fitted(world, module)
    return {"weights": module.weights}


class Alternating(Manual):
    """Two optimizers, each with its own backward, of which one leaves half of the parameters out."""

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [training.optimizer_of(self.run, each) for each in (self.model[0], self.model[2])]


def alternating(world):
    module = Alternating()
    fitted(world, module, asked={"find_unused_parameters": True})
    return {"weights": module.weights}


class AccumulatingByHand(Manual):
    def training_step(self, batch, batch_idx):
        optimizer, steps = self.optimizers(), batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=steps):
            self.manual_backward(self.loss(batch) / 2)
            if steps:
                optimizer.step()
                optimizer.zero_grad()


def accumulate_by_hand(world):
    module = AccumulatingByHand()
    fitted(world, module)
    return {"weights": module.weights}


def accumulate(world):
    module = Module()
    fitted(world, module, accumulate_grad_batches=4)
    return {"weights": module.weights}


def clip(world):
    module = Module()
    fitted(world, module, gradient_clip_val=0.1)
    return {"weights": module.weights}


def comm_hook(world):
    module = Module()
    fitted(world, module, asked={"ddp_comm_hook": allreduce_hook, "ddp_comm_wrapper": lambda hook: hook})
    return {"weights": module.weights}


class OneCycle(Module):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def one_cycle(world):
    module = OneCycle()
    trainer = fitted(world, module)
    return {"weights": module.weights, "batches": trainer.estimated_stepping_batches}


class Reloading(Module):
    def __init__(self, world):
        super().__init__()
        self.world = world

    def train_dataloader(self):
        return self.world.loader(loader_of())


def reload(world):
    module = Reloading(world)
    trainer = world.trainer(max_epochs=4, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module)
    return {"weights": module.weights}


def weighted_sampler(world):
    module = Module()
    sampler = WeightedRandomSampler(torch.linspace(1, 4, RUN.samples), 64)
    fitted(world, module, loader_of(shuffle=None, sampler=sampler))
    return {"weights": module.weights}


def distributed_sampler(world):
    module = Module()
    loader = loader_of()
    parts = {} if isinstance(world, Together) else {"num_replicas": 1, "rank": 0}
    fitted(world, module, loader_of(shuffle=None, sampler=DistributedSampler(loader.dataset, **parts)))
    return {"weights": module.weights}


def in_order(world):
    module = Module()
    fitted(world, module, loader_of(shuffle=False))
    return {"weights": module.weights}


class Lists:
    """A batch sampler of the user's own."""

    batch_size = 10

    def __iter__(self):
        return iter([list(range(start, min(start + 7 + start % 4, RUN.samples))) for start in range(0, 70, 7)])

    def __len__(self):
        return 10


def batch_sampler(world):
    module = Module()
    loader = loader_of(shuffle=None)
    fitted(world, module, DataLoader(loader.dataset, batch_sampler=Lists()))
    return {"weights": module.weights}


def data_workers(world):
    module = Module()
    fitted(world, module, loader_of(num_workers=1, persistent_workers=True))
    return {"weights": module.weights}


def leave_epochs(world):
    module = Module()
    fitted(world, module, limit_train_batches=4, max_epochs=3)
    return {"weights": module.weights}


def stop_at_a_step(world):
    module = Module()
    fitted(world, module, max_steps=8, max_epochs=-1)
    return {"weights": module.weights}


class Logging(Module):
    def __init__(self):
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.by_hand = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        inputs, targets, keys = batch
        outputs = self.model(inputs)
        loss = mse_loss(outputs, targets)
        self.error(outputs, targets)
        self.by_hand.update(keys.double())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("count", float(len(keys)), on_step=True, on_epoch=False, sync_dist=True, reduce_fx="sum")
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.log("keys", self.by_hand, on_step=False, on_epoch=True)
        return loss


class Told(Callback):
    """What was logged, of each batch and of each epoch."""

    def __init__(self):
        self.batches, self.epochs = [], []

    def on_train_batch_end(self, trainer, *_):
        self.batches.append([trainer.callback_metrics[name].item() for name in ("loss_step", "count")])

    def on_train_epoch_end(self, trainer, *_):
        self.epochs.append([trainer.callback_metrics[name].item() for name in ("loss_epoch", "error", "keys")])


class Later(Told):
    """Called after the metrics of the epoch are known."""

    def on_train_epoch_end(self, trainer, *_):
        """They are known in the next hook."""

    def on_train_epoch_start(self, trainer, *_):
        if "loss_epoch" in trainer.callback_metrics:
            Told.on_train_epoch_end(self, trainer)

    on_fit_end = on_train_epoch_start


def log(world):
    module, told = Logging(), Later()
    fitted(world, module, callbacks=[told])
    return {"weights": module.weights, "batches": told.batches, "epochs": told.epochs}


def stop_early(world):
    module = Logging()
    trainer = fitted(world, module, max_epochs=9, callbacks=[EarlyStopping("loss_epoch", min_delta=0.05, patience=0)])
    return {"weights": module.weights, "epochs": trainer.current_epoch}


class Validating(Module):
    def __init__(self):
        super().__init__()
        self.validated = []

    def validation_step(self, batch, batch_idx):
        inputs, targets, _ = batch
        self.log("validation", mse_loss(self.model(inputs), targets), sync_dist=True)

    def test_step(self, batch, batch_idx):
        inputs, targets, _ = batch
        self.log("test", mse_loss(self.model(inputs), targets), sync_dist=True)

    def on_validation_epoch_end(self):
        self.validated.append(self.trainer.callback_metrics["validation"].item())


def validate(world):
    module = Validating()
    others = loader_of(training.Run(samples=24, batch_size=2), shuffle=False)
    trainer = world.trainer(max_epochs=RUN.epochs, val_check_interval=2)
    trainer.fit(module, world.loader(loader_of()), others)
    outside = [trainer.validate(module, others, verbose=False), trainer.test(module, others, verbose=False)]
    values = [value for each in outside for value in each[0].values()]
    return {"weights": module.weights, "validated": module.validated, "outside": values}


def fit_twice(world):
    module = Module()
    trainer = fitted(world, module)
    trainer.fit_loop.max_epochs = 2 * RUN.epochs
    trainer.fit(module, world.loader(loader_of()))
    fitted(world, module, max_epochs=1)
    return {"weights": module.weights}


def with_fabric(world):
    """Two trainings in one process."""
    fabric, together = world.fabric(), isinstance(world, Together)
    found = {"weights": [], "losses": [], "seen": []}
    for _ in range(2):
        model = training.model_of(RUN)
        optimizer = training.optimizer_of(RUN, model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        model, optimizer = fabric.setup(model, optimizer)
        loader = world.set_up(fabric, loader_of())
        for number, (inputs, targets, keys) in chain.from_iterable(enumerate(loader) for _ in range(RUN.epochs)):
            steps = number % 3 != 0
            with fabric.no_backward_sync(model, enabled=together and not steps):
                loss = mse_loss(model(inputs), targets)
                fabric.backward(loss)
            if steps:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            found["seen"].append(keys.tolist())
            found["losses"].append(
                fabric.strategy.session.mean_over_workers(loss.item(), len(inputs)) if together else loss.item()
            )
        found["weights"] += training.weights(model.module)
        if together:
            fabric.strategy.session.close()
    return found


def accumulate_whole_batches_with_fabric(world):
    """Batches of two, five in a step for each worker on average; of the steps in every pass the last takes place."""
    together = isinstance(world, Together)
    fabric = world.fabric(accumulation=5, empty="copy")
    model = training.model_of(RUN)
    optimizer = training.optimizer_of(RUN, model)
    model, optimizer = fabric.setup(model, optimizer)
    dataset = TensorDataset(*training.data(RUN))
    loader = DataLoader(dataset, batch_size=2 if together else 30)
    loader = fabric.setup_dataloaders(loader) if together else loader
    for inputs, targets in chain.from_iterable(loader for _ in range(RUN.epochs)):
        fabric.backward(mse_loss(model(inputs), targets) / (5 if together else 1))
        optimizer.step()
        optimizer.zero_grad()
    if together:
        fabric.strategy.session.close()
    return {"weights": training.weights(model.module)}


EXACT = [
    automatic,
    named,
    manual,
    alternating,
    accumulate_by_hand,
    accumulate,
    clip,
    comm_hook,
    one_cycle,
    reload,
    weighted_sampler,
    distributed_sampler,
    in_order,
    batch_sampler,
    data_workers,
    leave_epochs,
    stop_at_a_step,
    log,
    stop_early,
    validate,
    fit_twice,
    with_fabric,
    accumulate_whole_batches_with_fabric,
]


def mixed(world):
    module = Module(training.Run(samples=77, epochs=2, dtype=torch.float32))
    fitted(world, module, loader_of(module.run), precision="bf16-mixed")
    return {"weights": module.weights}


ROUNDED = {mixed: 2e-2}
