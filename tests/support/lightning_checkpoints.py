"""Checkpoints of Lightning scripts, and mistakes in such scripts; in the form of lightning_habits."""

import warnings

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

from support import streams, training
from support.lightning_habits import RUN, Module, OneCycle, fitted, loader_of

# Checkpoints, which another number of workers continues from.

EPOCHS = 3


def whole(world):
    """All epochs without an interruption."""
    module, cycle = Module(), OneCycle()
    fitted(world, module, max_epochs=EPOCHS)
    fitted(world, cycle, max_epochs=EPOCHS)
    return {"module": module.weights, "cycle": cycle.weights, "seen": module.seen}


def kept(world, name, steps):
    return ModelCheckpoint(
        dirpath=f"{world.folder}/{name}", filename="{step}", every_n_train_steps=steps, save_top_k=-1
    )


def save(world):
    """Checkpoints within an epoch, at its end, after `fit`, and one of another strategy."""
    trainer = fitted(world, Module(), max_epochs=2, callbacks=[kept(world, "module", 2)])
    trainer.save_checkpoint(f"{world.folder}/module/after.ckpt")
    fitted(world, OneCycle(), max_epochs=EPOCHS, callbacks=[kept(world, "cycle", 4)])
    fitted(world, Module(), max_epochs=1, callbacks=[kept(world, "plain", 2)], strategy="ddp")
    return {}


SAVED = {"module/step=4": 4, "module/step=6": 6, "module/step=8": 8, "module/after": 12, "cycle/step=4": 4}
"""Checkpoints, and the batches before them."""


def resume(world):
    """Continue from each of them; another strategy can do so, too."""
    found = {}
    for name in SAVED:
        module = (OneCycle if name.startswith("cycle") else Module)()
        trainer = world.trainer(max_epochs=EPOCHS)
        trainer.fit(module, loader_of(), ckpt_path=f"{world.folder}/{name}.ckpt")
        assert trainer.global_step == 6 * EPOCHS
        found[name] = {"weights": module.weights, "seen": module.seen}
    trainer = world.trainer(max_epochs=EPOCHS, strategy="ddp")
    trainer.fit(Module(), loader_of(), ckpt_path=f"{world.folder}/module/after.ckpt")
    return found


def resume_another_strategys(world):
    trainer = world.trainer(max_epochs=EPOCHS)
    trainer.fit(Module(), loader_of(), ckpt_path=f"{world.folder}/plain/step=2.ckpt")


def fabric_parts(world, run=RUN):
    model, fabric = training.model_of(run), world.fabric()
    model, optimizer = fabric.setup(model, training.optimizer_of(run, model))
    return fabric, model, optimizer, world.set_up(fabric, loader_of())


def train_with_fabric(fabric, model, optimizer, loader, stop=None):
    for number, (inputs, targets, _) in enumerate(loader):
        fabric.backward(mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
        if number == stop:
            return


def save_with_fabric(world):
    fabric, model, optimizer, loader = fabric_parts(world)
    train_with_fabric(fabric, model, optimizer, loader)
    train_with_fabric(fabric, model, optimizer, loader, stop=2)
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    fabric.save(f"{world.folder}/fabric.ckpt", parts)
    fabric.strategy.session.close()
    return {}


def resume_with_fabric(world):
    fabric, model, optimizer, loader = fabric_parts(world)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The global batch size of the checkpoint replaces that of two workers.
        fabric.load(f"{world.folder}/fabric.ckpt", {"model": model, "optimizer": optimizer, "loader": loader})
    for _ in range(EPOCHS - 1):
        train_with_fabric(fabric, model, optimizer, loader)
    fabric.strategy.session.close()
    return {"weights": training.weights(model.module)}


RESUMES = [resume, resume_with_fabric, resume_another_strategys]


# Data of each worker's own.


class Own(Module):
    """`seen` has the numbers of the samples that count."""

    def training_step(self, batch, batch_idx):
        share, rank = self.trainer.strategy._loader.prepared.current, self.trainer.global_rank
        self.seen.append(streams.numbers_of(batch[0][: share.samples], rank))
        return mse_loss(self.model(batch[0]), batch[1])


COUNTS = (31, 12, 18)


def own_data(world):
    """Streams and private datasets, from the beginning and from within an epoch; what each worker got."""
    rank, found = dist.get_rank(), {}
    for kind, asked in (("tuples", {}), ("map", {"partition": "private"})):
        for name, begins in ((None, 1), ("step=4", 2), ("after", 2)):
            callbacks, path = ([], f"{world.folder}/{kind}/{name}.ckpt") if name else ([kept(world, kind, 4)], None)
            module, trainer = Own(), world.trainer(asked, max_epochs=begins, callbacks=callbacks)
            trainer.fit(module, streams.loader_of(kind, rank, COUNTS[rank]), ckpt_path=path)
            if name is None:
                trainer.save_checkpoint(f"{world.folder}/{kind}/after.ckpt")
            found[kind, name] = {"seen": module.seen, "weights": module.weights}
    return found


def own_data_alone(batches):
    """The weights of one process on the union of what each worker got."""
    torch.set_default_dtype(torch.float64)
    return streams.train_alone(RUN, COUNTS, [[own] for own in batches])


# Mistakes.


def on_servers(world):
    fitted(world, Module(), asked={"scheme": "ssp:bound=2"})


def local_steps(world):
    fitted(world, Module(), asked={"scheme": "local-sgd:period=4"})


def unknown_scheme(world):
    fitted(world, Module(), asked={"scheme": "nosuch"})


def fabric_on_servers(world):
    model, fabric = training.model_of(RUN), world.fabric(scheme="asp")
    fabric.setup(model)


def two_loaders(world):
    fitted(world, Module(), {"one": loader_of(), "other": loader_of()})


class TakesIterator(Module):
    def training_step(self, dataloader_iter):
        return self.loss(next(dataloader_iter)[0])


def take_the_iterator(world):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted(world, TakesIterator())


class Sharded(Module):
    def configure_model(self):
        fully_shard(self.model)


def shard(world):
    fitted(world, Sharded())


MISTAKES = {
    on_servers: "which the scheme 'ssp:bound=2' does not",
    local_steps: "which the scheme 'local-sgd:period=4' does not",
    fabric_on_servers: "which the scheme 'asp' does not",
    unknown_scheme: "nosuch",
    two_loaders: "has 2 loaders",
    take_the_iterator: "takes dataloader_iter",
    shard: "fully_shard",
}
