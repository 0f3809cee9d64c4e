"""What the tests of workers of several processes run in their processes: models that are split over a device mesh."""

import contextlib
import math
import os
import runpy
import signal
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.schemes import Scheme
from evenstep.testing.scripted import Scripted
from support import habits, training
from support.sharded import Busy

DDP, FSDP, HSDP, CONTEXT = ("dp", "tp"), ("shard", "tp"), ("replicate", "shard"), ("shard", "cp")
TP, SHARDS = ("tp",), ("shard",)
HSDP_TP = (*HSDP, "tp")
CLIP = {DDP: math.inf, FSDP: 0.1, HSDP: 0.1, HSDP_TP: 0.1}
"""The norm to which gradients are clipped. torch does not know that of a model that was split by hand."""
PLACEMENTS = (Shard(0),), (Shard(0),), (Shard(1),), (Replicate(),)
"""Of the parameters, over the dimension of tensor parallelism."""


def mesh_of(names):
    """With two processes along each dimension, but one along `shard` if they are too few."""
    two = dist.get_world_size() == 2 ** len(names)
    shape = tuple(1 if name == "shard" and not two else 2 for name in names)
    dist.new_group([0])  # As a script may have one of some of its processes.
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def model_on(mesh, run, model=None):
    """The model, split and in DistributedDataParallel or shards, as the names of the mesh say."""
    model = training.model_of(run) if model is None else model
    names = mesh.mesh_dim_names
    if "dp" in names:
        split_by_hand(model, mesh["tp"])
        return DistributedDataParallel(model, device_mesh=mesh["dp"])
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), f"{len(model) - 1}": RowwiseParallel()})
    if names == TP:
        return model
    over = mesh[names]._flatten("shard_cp") if names == CONTEXT else mesh[tuple(each for each in names if each != "tp")]
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)


class Sum(torch.autograd.Function):
    """Sums outputs over peers, each of which then goes on alike."""

    @staticmethod
    def forward(_, outputs, group):
        dist.all_reduce(outputs, group=group)
        return outputs

    @staticmethod
    def backward(_, gradient):
        return gradient, None


def split_by_hand(model, mesh):
    """Tensor parallelism with plain tensors, as of Megatron-LM."""
    inner, outer = model[0], model[-1]
    for each, dim in (inner.weight, 0), (inner.bias, 0), (outer.weight, 1):
        each.data = each.data.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
    outer.forward = lambda inputs: Sum.apply(inputs @ outer.weight.T, mesh.get_group()) + outer.bias


def prepared(run, names, *, dataset=None, model=None, **options):
    """Returns the whole weights, too, as a function."""
    mesh = mesh_of(names)
    split = model_on(mesh, run, model)
    parameters = list(split.parameters())
    dims = tuple(name for name in names if name not in ("tp", "cp"))
    run = replace(run, options={**run.options, "mesh": mesh, "data_dims": dims, **options})

    def all_of_them():
        parts = [each if isinstance(each, DTensor) else None for each in parameters]
        full = [
            DTensor.from_local(each, mesh["tp"], placements) if part is None else part
            for each, part, placements in zip(parameters, parts, PLACEMENTS, strict=True)
        ]
        return whole(full).tolist()

    return *training.prepared(run, model=split, dataset=dataset), all_of_them


def whole(parameters):
    """The weights, also those of which these are parts."""
    full = [each.full_tensor() if isinstance(each, DTensor) else each for each in parameters]
    return torch.cat([each.detach().flatten() for each in full])


def train(run, names):
    model, optimizer, loader, whole = prepared(run, names)
    sizes, sums = [], []
    for _ in range(run.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP[names])
            optimizer.step()
            sizes.append(loader.current.sizes.tolist())
            sums.append(float(inputs.sum()))
    return {"weights": whole(), "sizes": sizes, "sums": sums}


HABITS = (
    habits.step_in_inner_loops,
    habits.accumulate_in_no_sync,
    habits.accumulate_and_weigh,
    habits.accumulate_by_the_flag,
    habits.backward_twice,
    habits.keep_gradients_of_the_last_iteration,
    habits.two_models_one_backward,
    habits.adversaries,
    habits.checkpoint_activations,
    habits.step_with_a_closure,
    habits.scale_the_loss,
    habits.scale_and_accumulate,
    habits.count_after_the_forward_pass,
)
"""Those of scripts for one device that go with split models as they are."""


def train_by_habits(run, names):
    """What each habit comes to; its models are split where it prepares them, and its optimizers made again."""
    mesh = mesh_of(names)
    dims = tuple(name for name in names if name != "tp")
    options = {"scheme": run.chosen_scheme(), "mesh": mesh, "data_dims": dims, "global_batch_size": habits.GLOBAL_BATCH}

    def split(model, optimizer, loader):
        models, optimizers = ((each if isinstance(each, tuple) else (each,)) for each in (model, optimizer))
        for each in models:
            layers = [name for name, part in each.named_modules() if name and isinstance(part, torch.nn.Linear)]
            if len(layers) == 2:
                parallelize_module(
                    each, mesh["tp"], dict(zip(layers, (ColwiseParallel(), RowwiseParallel()), strict=True))
                )
            fully_shard(each, mesh=mesh[dims])
        owned = models if len(optimizers) > 1 else (torch.nn.ModuleList(models),)
        made = tuple(type(old)(each.parameters(), **old.defaults) for old, each in zip(optimizers, owned, strict=True))
        return model, made if isinstance(optimizer, tuple) else made[0], loader

    def attempted(habit):
        return habits.attempt(lambda run, prepare: habit(run, lambda *parts: prepare(*split(*parts))), run, options)

    return {habit.__name__: attempted(habit) for habit in HABITS}


class Block(torch.nn.Module):
    """Of a language model, without attention, which its rows of positions do not need to learn."""

    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.keeps = True

    def forward(self, inputs):
        return inputs + (self._inner(inputs) if self.keeps else checkpoint(self._inner, inputs, use_reentrant=False))

    def _inner(self, inputs):
        return self.down(self.up(self.norm(inputs)).relu())


def words(run):
    inputs = torch.randint(12, (run.samples, 4), generator=torch.Generator().manual_seed(2))
    return inputs, (inputs * 5 + inputs.roll(1, 1)) % 12


def language_model(run):
    torch.manual_seed(1)
    ends = torch.nn.Embedding(12, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 12)
    return torch.nn.Sequential(ends[0], Block(8), Block(8), *ends[1:]).to(run.dtype)


def learn_words(model, optimizer, batches, context=contextlib.nullcontext):
    for inputs, targets in batches:
        with context():
            torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_language_model(run, names, sequence):
    """In sequence parallelism, with a loss on parts; or a compiled block, blocks without activations, fused Adam."""
    mesh, model, data_dims = mesh_of(names), language_model(run), tuple(name for name in names if name != "tp")
    within, head = {"up": ColwiseParallel(), "down": RowwiseParallel()}, ColwiseParallel(output_layouts=Replicate())
    plan = {"4": head}
    if sequence:
        parts = {"input_layouts": Shard(1)}
        within = {"up": ColwiseParallel(**parts), "down": RowwiseParallel(output_layouts=Shard(1))}
        within["norm"] = SequenceParallel()
        plan["0"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan |= {"3": SequenceParallel(), "4": ColwiseParallel(**parts, use_local_output=False)}
    parallelize_module(model, mesh["tp"], plan)
    for block in model[1:3]:
        parallelize_module(block, mesh["tp"], within)
        block.keeps = sequence
        if not sequence and block is model[2]:
            block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh[data_dims])
    optimizer = torch.optim.Adam(fully_shard(model, mesh=mesh[data_dims]).parameters(), lr=0.01, fused=not sequence)
    loader = DataLoader(
        TensorDataset(*words(run)), batch_size=run.batch_size, shuffle=True, num_workers=run.num_workers
    )
    model, optimizer, loader = evenstep.prepare(
        model, optimizer, loader, scheme=run.chosen_scheme(), seed=run.seed, mesh=mesh, data_dims=data_dims
    )
    every = (batch for _ in range(run.epochs) for batch in loader)
    learn_words(model, optimizer, every, loss_parallel if sequence else contextlib.nullcontext)
    return training.weights(model)


def train_language_model_alone(run, global_batch_size):
    model, (inputs, targets) = language_model(run), words(run)
    slices = (part for epoch in range(run.epochs) for part in training.epoch_order(run, epoch).split(global_batch_size))
    batches = ((inputs[part], targets[part]) for part in slices)
    learn_words(model, torch.optim.Adam(model.parameters(), lr=0.01), batches)
    return training.weights(model)


def train_on_parts(run):
    """Context parallelism: of the sequence of each sample, a half on each peer. The loss is the mean over its half."""
    inputs, targets = training.data(run)
    dataset = TensorDataset(*(torch.stack([each, each.flip(0)], dim=1) for each in (inputs, targets)))
    model, optimizer, loader, whole = prepared(run, CONTEXT, dataset=dataset)
    half, sizes = dist.get_rank() % 2, []
    for _ in range(run.epochs):
        for rows, wanted in loader:
            training.step(model, optimizer, rows[:, half], wanted[:, half])
            sizes.append(loader.current.sizes.tolist())
    return {"weights": whole(), "sizes": sizes}


def train_on_parts_alone(run, global_batch_size):
    model = training.model_of(run)
    optimizer = training.optimizer_of(run, model)
    inputs, targets = training.data(run)
    for epoch in range(run.epochs):
        for part in training.epoch_order(run, epoch).split(global_batch_size):
            both = torch.cat([part, run.samples - 1 - part])
            training.step(model, optimizer, inputs[both], targets[both])
    return training.weights(model)


def train_with_split_outputs(run):
    """The outputs of the model are a DTensor, each peer's a column. The number of iterations."""
    mesh = mesh_of(FSDP)
    model = torch.nn.Linear(training.FEATURES, 2, dtype=run.dtype)
    parallelize_module(model, mesh["tp"], ColwiseParallel(output_layouts=Shard(-1), use_local_output=False))
    run = replace(run, options={"mesh": mesh, "data_dims": FSDP[:1]})
    model, optimizer, loader = training.prepared(run, model=fully_shard(model, mesh=mesh[FSDP[0]]))
    for inputs, targets in loader:
        optimizer.zero_grad()
        outputs = model(inputs).full_tensor()
        torch.nn.functional.mse_loss(outputs, targets.expand_as(outputs)).backward()
        optimizer.step()
    return loader.iteration


def train_pipelines(run, global_batch_size, micro_batch):
    """Replicas of two stages each, which get their batches as in examples/pipeline.py. The weights of this stage."""
    batches = runpy.run_path(str(Path(__file__).parents[2] / "examples/pipeline.py"))["batches"]
    mesh = mesh_of(("dp", "pp"))
    replicas, number, stages = mesh["dp"], mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    module, balancer = training.model_of(run)[2 * number : 2 * number + 2], None
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=stages)
    optimizer = training.optimizer_of(run, module)
    inputs, targets = training.data(run)

    def all_gather(row):
        rows = [torch.empty(len(row), dtype=torch.uint8) for _ in range(replicas.size())]
        dist.all_gather(rows, torch.frombuffer(bytearray(row), dtype=torch.uint8), group=replicas.get_group())
        return [each.numpy().tobytes() for each in rows]

    if number == 0:
        load = Scripted(seed=run.scripted, multiple=micro_batch, minimum=2 * micro_batch)
        balancer = evenstep.Balancer(
            Scheme(name="scripted", load=load),
            rank=replicas.get_local_rank(),
            workers=replicas.size(),
            all_gather=all_gather,
            length=run.samples,
            global_batch_size=global_batch_size,
            shuffle=False,
        )
    sizes = []
    for epoch in range(run.epochs):
        for positions in batches(balancer, epoch, stages):
            own = training.epoch_order(run, epoch)[positions]
            schedule = Schedule1F1B(stage, len(own) // micro_batch, loss_fn=torch.nn.functional.mse_loss)
            optimizer.zero_grad()
            if number == 0:
                with balancer.compute():
                    schedule.step(inputs[own])
            else:
                schedule.step(target=targets[own])
            for parameter in module.parameters():
                parameter.grad *= len(own) / global_batch_size
                dist.all_reduce(parameter.grad, group=replicas.get_group())
            optimizer.step()
            sizes.append(len(own))
    return {"weights": training.weights(module), "sizes": sizes}


def train_beside_a_busy_peer(run, names, rank):
    """One process computes much more than the others in each pass. The sizes at the end."""
    model = training.model_of(run)
    model.insert(1, Busy(rank))
    model, optimizer, loader, _ = prepared(run, names, model=model)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
    return loader.current.sizes.tolist()


def die(run, names, rank, iteration, name):
    """What the others end with: a collective of a split model fails in the script's own code."""
    shown = []
    sys.excepthook = lambda _, error, __: shown.append(error)
    model, optimizer, loader, _ = prepared(run, names)
    try:
        for inputs, targets in loader:
            if (dist.get_rank(), loader.iteration) == (rank, iteration):
                os.kill(os.getpid(), signal.Signals[name])
            training.step(model, optimizer, inputs, targets)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)  # As at the end of a process.
        raise shown[0] from error


def train_on_another_sample(run, names, rank, sample):
    """This process has another one than the others."""
    inputs, targets = training.data(run)
    inputs[sample] += dist.get_rank() == rank
    model, optimizer, loader, _ = prepared(run, names, dataset=TensorDataset(inputs, targets))
    for batch in loader:
        training.step(model, optimizer, *batch)


def step_more_often(run, names, rank, iteration):
    """One peer steps twice in an iteration."""
    model, optimizer, loader, _ = prepared(run, names)
    for inputs, targets in loader:
        training.step(model, optimizer, inputs, targets)
        if (dist.get_rank(), loader.iteration) == (rank, iteration):
            optimizer.step()


def train_saving(run, names, folder, save_at):
    model, optimizer, loader, _ = prepared(run, names)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
            if loader.iteration == save_at:
                evenstep.checkpoint.save(folder, model, optimizer, loader)
            if loader.iteration == save_at + 2:
                loader.close()
                return


def train_restored(run, names, folder):
    model, optimizer, loader, whole = prepared(run, names)
    assert evenstep.checkpoint.restore(folder, model, optimizer, loader) is not None
    for _ in range(loader.epoch, run.epochs):
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
    return {"weights": whole()}


def refusals(run):
    """What each wish is refused with."""
    said, mesh = {}, mesh_of(DDP)
    for name, options in {
        "local-sgd": {"scheme": "local-sgd:period=2"},
        "micro_batch": {"scheme": "bsp:micro_batch=2"},
        "private": {"scheme": "bsp", "partition": "private"},
        "process_group": {"scheme": "bsp", "process_group": dist.group.WORLD},
        "pipeline": {"scheme": "bsp", "mesh": mesh_of(("dp", "pp"))},
        "no data_dims": {"scheme": "bsp", "data_dims": ()},
        "other data_dims": {"scheme": "bsp", "data_dims": ["fsdp"]},
        "no mesh": {"scheme": "bsp", "mesh": None},
        "slice": {"scheme": "bsp", "mesh": mesh["dp"]},
        "plain": {"scheme": "bsp", "model": "split"},
        "DDP": {"scheme": "bsp", "model": "dp"},
        "no mesh for the plain": {"scheme": "bsp", "model": "split", "mesh": None, "data_dims": ()},
        "another group": {"scheme": "bsp", "model": "all"},
    }.items():
        model = training.model_of(run)
        given = {"mesh": mesh, "data_dims": ["dp"], **options}
        kind = given.pop("model", None)
        if kind in ("split", "dp"):
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if kind in ("dp", "all"):
            model = DistributedDataParallel(model, device_mesh=mesh["dp"] if kind == "dp" else None)
        try:
            training.prepared(replace(run, scheme=given.pop("scheme"), options=given), model=model)
        except evenstep.ConfigError as error:
            said[name] = str(error)
    return said
