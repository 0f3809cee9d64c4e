"""What the tests of FSDP2 run in their worker processes."""

import os
import signal
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import evenstep
import evenstep.torch
from support import training


def sharded(model, *, shard_states=1, **options):
    """Each layer that has weights sharded by itself; no width is a multiple of the number of workers."""
    workers = dist.get_world_size()
    if shard_states == 1:
        mesh = init_device_mesh("cpu", (workers,))
    else:
        mesh = init_device_mesh("cpu", (shard_states, workers // shard_states), mesh_dim_names=("replicas", "shards"))
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def prepared(run, **options):
    return training.prepared(run, model=sharded(training.model_of(run), **options))


def train(run, *, shard_states=1, clip=None):
    model, optimizer, loader = prepared(run, shard_states=shard_states)
    sizes = []
    for _ in range(run.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            sizes.append(loader.current.sizes.tolist())
    return {"weights": training.weights(model), "sizes": sizes, "keys": sorted(model.state_dict())}


def train_heard(run):
    """As `train`; returns what evenstep warned of, too."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        trained = train(run)
    return {**trained, "warnings": [text for each in heard if "prepare" in (text := str(each.message))]}


def train_replicated(run):
    return train(run, shard_states=2)


def train_clipped(run):
    return train(run, clip=0.1)


def train_clipped_alone(run, global_batch_size, clip):
    """The same in one process, in plain torch."""
    model = training.model_of(run)
    optimizer = training.optimizer_of(run, model)
    inputs, targets = training.data(run)
    for epoch in range(run.epochs):
        for part in training.epoch_order(run, epoch).split(global_batch_size):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[part]), targets[part]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return training.weights(model)


def train_weighed(run):
    model, optimizer, loader = prepared(run)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            units = training.units_of(inputs)
            loader.weigh_by(int(units.sum()))
            loss = (units * (model(inputs) - targets) ** 2).sum() / units.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {"weights": training.weights(model)}


def train_accumulating(run):
    """Windows of `run.accumulate`, as a script for FSDP2 writes them."""
    model, optimizer, loader = prepared(run)
    in_window = 0
    for _ in range(run.epochs):
        for inputs, targets in loader:
            in_window += 1
            last = in_window % run.accumulate == 0
            model.module.set_requires_gradient_sync(last)
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    return {"weights": training.weights(model)}


def overflow(run, worker, iteration):
    """Half precision with a scaler; one worker's loss is infinite once. Scale and weights before and after it."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16)
    model, optimizer, loader = prepared(run, mp_policy=policy)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    told = {}
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs).float(), targets)
        if loader.iteration == iteration:
            told["before"] = (scaler.get_scale(), training.weights(model))
            if dist.get_rank() == worker:
                loss = loss * torch.inf
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if loader.iteration == iteration:
            told["after"] = (scaler.get_scale(), training.weights(model))
    return {**told, "end": training.weights(model)}


class Busy(torch.nn.Module):
    """Computes much more on one worker than on the others."""

    def __init__(self, worker):
        super().__init__()
        self.much = dist.get_rank() == worker

    def forward(self, inputs):
        if self.much:
            matrix = torch.rand(400, 400)
            for _ in range(30):
                matrix = matrix @ matrix / 400
            inputs = inputs + 0 * matrix.sum().to(inputs)
        return inputs


def train_beside_a_busy_worker(run, worker, run_dir):
    model = training.model_of(run)
    model.insert(1, Busy(worker))
    model, optimizer, loader = evenstep.prepare(
        *with_optimizer(run, sharded(model)), training_loader(run), scheme="bsp", run_dir=run_dir
    )
    with loader:
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)


def average_beside_a_busy_worker(run, worker, run_dir):
    """Workers that do not shard, and average their losses before each backward."""
    meet_beside_a_busy_worker(run, worker, run_dir, lambda loader, loss, _: loader.mean_over_workers(loss, 1))


def sum_beside_a_busy_worker(run, worker, run_dir):
    """Their script sums by itself, and in another group of its own."""
    group = dist.new_group()

    def meet(_, loss, outputs):
        dist.all_reduce(loss.detach().clone())
        dist.all_gather_object([None] * dist.get_world_size(), outputs.tolist(), group=group)

    meet_beside_a_busy_worker(run, worker, run_dir, meet)


def gather_beside_a_busy_worker(run, worker, run_dir):
    meet_beside_a_busy_worker(run, worker, run_dir, lambda _, __, outputs: evenstep.torch.all_gather(outputs))


def meet_beside_a_busy_worker(run, worker, run_dir, meet):
    model = training.model_of(run)
    model.insert(1, Busy(worker))
    model, optimizer, loader = evenstep.prepare(
        *with_optimizer(run, model), training_loader(run), scheme="bsp", run_dir=run_dir
    )
    with loader:
        for inputs, targets in loader:
            outputs = model(inputs)
            loss = torch.nn.functional.mse_loss(outputs, targets)
            meet(loader, loss, outputs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def with_optimizer(run, model):
    return model, training.optimizer_of(run, model)


def training_loader(run):
    dataset = torch.utils.data.TensorDataset(*training.data(run))
    return torch.utils.data.DataLoader(dataset, batch_size=run.batch_size, shuffle=True)


def train_saving(run, folder, save_at, asynchronous):
    """Saves at this iteration, and leaves after two more."""
    model, optimizer, loader = prepared(run)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
            if loader.iteration == save_at:
                evenstep.checkpoint.save(folder, model, optimizer, loader, asynchronous=asynchronous)
            if loader.iteration == save_at + 2:
                loader.close()
                return


def train_restored(run, folder):
    model, optimizer, loader = prepared(run)
    assert evenstep.checkpoint.restore(folder, model, optimizer, loader) is not None
    for _ in range(loader.epoch, run.epochs):
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
    return {"weights": training.weights(model)}


def die(run, worker, iteration):
    model, optimizer, loader = prepared(run)
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        if (dist.get_rank(), loader.iteration) == (worker, iteration):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def refusals(run):
    """What each wish is refused with."""

    def part():
        model = training.model_of(run)
        fully_shard(model[0])
        return model

    said = {}
    for name, options, model in (
        ("local-sgd", {"scheme": "local-sgd:period=2"}, None),
        ("micro_batch", {"scheme": "bsp:micro_batch=2"}, None),
        ("comm_hook", {"scheme": "bsp", "comm_hook": (None, print)}, None),
        ("part", {"scheme": "bsp"}, part()),
    ):
        model = sharded(training.model_of(run)) if model is None else model
        try:
            evenstep.prepare(*with_optimizer(run, model), training_loader(run), **options)
        except evenstep.ConfigError as error:
            said[name] = str(error)
    return said
