"""What the worker processes of the runtime's tests run; each function returns plain values."""

import contextlib
import copy
import os
import pickle
import signal
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, default_collate

import evenstep
from evenstep.schemes import Scheme
from evenstep.testing.scripted import Scripted
from evenstep.torch.engines.direct_sum import DirectSum
from evenstep.torch.engines.narrow import NarrowSum
from evenstep.torch.processes.join_workers import join_workers
from evenstep.worker import agreement

FEATURES = 6


@dataclass(kw_only=True)
class Run:
    """One training run: small enough for a test, with everything that could go wrong in it."""

    samples: int = 90
    batch_size: int = 5
    epochs: int = 3
    scheme: Any = None
    scripted: int | None = None
    parts: dict = field(default_factory=dict)
    """Further parts of the scripted scheme: its period, weighting, exchange or micro_batch."""
    dtype: torch.dtype = torch.float64
    optimizer: str = "momentum"
    num_workers: int = 0
    seed: int = 3
    accumulate: int = 1
    global_batch_size: int | None = None
    options: dict = field(default_factory=dict)

    def chosen_scheme(self):
        if self.scripted is None:
            return self.scheme
        load = Scripted(seed=self.scripted, multiple=self.parts.get("micro_batch", 1))
        return Scheme(name="scripted", load=load, **self.parts)


def data(run):
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(run.samples, FEATURES, generator=generator, dtype=run.dtype)
    return inputs, (inputs.sum(1, keepdim=True).sin() + inputs[:, :1] ** 2)


def model_of(run):
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    return layers.to(run.dtype)


def optimizer_of(run, model):
    if run.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0 if run.optimizer == "sgd" else 0.9)


def stacked(samples):
    """A collate function that pads, for samples that need no padding."""
    return default_collate(samples)


def weights(model):
    """On every worker the whole, also of a model in shards."""
    whole = (each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters())
    return torch.cat([each.detach().flatten() for each in whole]).tolist()


def prepared(run, model=None, dataset=None, **loader_options):
    model = model_of(run) if model is None else model
    loader = DataLoader(
        TensorDataset(*data(run)) if dataset is None else dataset,
        batch_size=run.batch_size,
        num_workers=run.num_workers,
        **{"shuffle": True, **loader_options},
    )
    return evenstep.prepare(
        model,
        optimizer_of(run, model),
        loader,
        scheme=run.chosen_scheme(),
        seed=run.seed,
        global_batch_size=run.global_batch_size,
        **run.options,
    )


def train(run):
    """An ordinary loop; returns weights, the number of iterations, and every iteration's sizes."""
    model, optimizer, loader = prepared(run)
    sizes = []
    for _ in range(run.epochs):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sizes.append(loader.current.sizes.tolist())
    return {
        "weights": weights(model),
        "iterations": loader.iteration,
        "sizes": sizes,
        "misses": loader.statistics().misses,
    }


def train_and_warn(run):
    """As `train`, with the warnings of this worker."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        return {**train(run), "warnings": [str(each.message) for each in caught]}


def epoch_order(run, epoch):
    """The documented order of an epoch: torch.randperm from a generator seeded with seed + epoch."""
    return torch.randperm(run.samples, generator=torch.Generator().manual_seed(run.seed + epoch))


def train_alone(run, global_batch_size):
    """The same mathematics in one process, in plain torch."""
    model = model_of(run)
    optimizer = optimizer_of(run, model)
    inputs, targets = data(run)
    in_window = 0
    for epoch in range(run.epochs):
        order = epoch_order(run, epoch)
        for start in range(0, run.samples, global_batch_size):
            part = order[start : start + global_batch_size]
            if in_window == 0:
                optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[part]), targets[part]).backward()
            in_window += 1
            if in_window == run.accumulate:
                optimizer.step()
                in_window = 0
    return weights(model)


def train_accumulating(run):
    """Gradients of `run.accumulate` iterations per step, the last one synchronised; windows run across epochs."""
    model, optimizer, loader = prepared(run)
    in_window = 0
    for _ in range(run.epochs):
        for inputs, targets in loader:
            if in_window == 0:
                optimizer.zero_grad()
            in_window += 1
            if in_window < run.accumulate:
                with model.no_sync():
                    torch.nn.functional.mse_loss(model(inputs), targets).backward()
                continue
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            in_window = 0
    return {"weights": weights(model)}


def train_plain_ddp(run):
    """Plain DDP without any hook on consecutive parts of the same slices."""
    model = DistributedDataParallel(model_of(run))
    optimizer = optimizer_of(run, model)
    inputs, targets = data(run)
    rank, count = dist.get_rank(), dist.get_world_size()
    for epoch in range(run.epochs):
        order = epoch_order(run, epoch)
        for start in range(0, run.samples, run.batch_size * count):
            part = order[start + rank * run.batch_size : start + (rank + 1) * run.batch_size]
            loss = torch.nn.functional.mse_loss(model(inputs[part]), targets[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {"weights": weights(model)}


class Numbered(Dataset):
    """Sample i is the number i, and a random number drawn while getting it."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        return torch.full((FEATURES,), float(index), dtype=torch.float64), torch.rand(1, dtype=torch.float64)


def visit(run, stop_after=None, state=None, collate=None):
    """Which samples this worker got, in which epoch and iteration; the loader's state where it stopped."""
    options = {} if collate is None else {"collate_fn": collate}
    model, optimizer, loader = prepared(run, dataset=Numbered(run.samples), **options)
    if state is not None:
        loader.load_state_dict(state)
    visits = []
    saved = None
    first = 0 if state is None else state["epoch"]
    for epoch in range(first, run.epochs):
        loader.set_epoch(epoch)
        for numbers, drawn in loader:
            model(numbers).sum().backward()
            optimizer.zero_grad()
            share = loader.current
            seen = numbers[:, 0].long().tolist()[: share.samples]
            visits.append((epoch, share.iteration, seen, drawn[: share.samples, 0].tolist(), share.sizes.tolist()))
            if len(visits) == stop_after:
                saved = loader.state_dict()
        if saved is not None:
            break
    return {"visits": visits, "state": saved, "misses": loader.statistics().misses, "length": len(loader)}


def visit_until(run, stop_after):
    """As `visit`, but leaving the loop right after the state was saved."""
    model, _, loader = prepared(run, dataset=Numbered(run.samples))
    visits = []
    for epoch in range(run.epochs):
        loader.set_epoch(epoch)
        for numbers, drawn in loader:
            model(numbers).sum().backward()
            share = loader.current
            seen = numbers[:, 0].long().tolist()[: share.samples]
            visits.append((epoch, share.iteration, seen, drawn[: share.samples, 0].tolist(), share.sizes.tolist()))
            if len(visits) == stop_after:
                return {"visits": visits, "state": loader.state_dict()}
    raise AssertionError("the run was shorter than stop_after")


def as_lists(samples):
    """A collate_fn of a user's own."""
    numbers, drawn = zip(*samples, strict=True)
    return torch.stack(numbers), torch.stack(drawn)


def train_and_resume(run, stop_after):
    """Stops after some iterations, saves everything, and goes on in a new loader, model and optimizer."""
    model, optimizer, loader = prepared(run)
    done = 0
    for epoch in range(run.epochs):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            step(model, optimizer, inputs, targets)
            done += 1
            if done == stop_after:
                break
        if done == stop_after:
            break
    loader.settle()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
    model, optimizer, loader = prepared(run)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    for epoch in range(saved["loader"]["epoch"], run.epochs):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            step(model, optimizer, inputs, targets)
    return {"weights": weights(model), "keys": sorted(model.state_dict())}


def step(model, optimizer, inputs, targets):
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def train_distributed_sampler(run):
    """The script of a DDP user: DDP-wrapped model, DistributedSampler, set_epoch on the sampler."""
    model = DistributedDataParallel(model_of(run))
    optimizer = optimizer_of(run, model)
    dataset = TensorDataset(*data(run))
    sampler = DistributedSampler(dataset, seed=run.seed)
    loader = DataLoader(dataset, batch_size=run.batch_size, sampler=sampler)
    model, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme=run.chosen_scheme())
    for epoch in range(run.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            step(model, optimizer, inputs, targets)
    return {"weights": weights(model)}


def train_weighed(run):
    """A loss that is a mean over a number of units that differs from sample to sample."""
    model, optimizer, loader = prepared(run)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            units = units_of(inputs)
            loader.weigh_by(int(units.sum()))
            loss = (units * (model(inputs) - targets) ** 2).sum() / units.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {"weights": weights(model)}


def train_weighed_alone(run, global_batch_size):
    model = model_of(run)
    optimizer = optimizer_of(run, model)
    inputs, targets = data(run)
    for epoch in range(run.epochs):
        order = epoch_order(run, epoch)
        for start in range(0, run.samples, global_batch_size):
            part = order[start : start + global_batch_size]
            units = units_of(inputs[part])
            loss = (units * (model(inputs[part]) - targets[part]) ** 2).sum() / units.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return weights(model)


def units_of(inputs):
    return 1 + (inputs[:, 1:2].abs() * 10).long()


def train_two_models(run):
    """Two models and two optimizers on one loader, each with its own backward in every iteration."""
    first, second = model_of(run), model_of(run)
    loader = DataLoader(TensorDataset(*data(run)), batch_size=run.batch_size, shuffle=True)
    (first, second), (one, two), loader = evenstep.prepare(
        (first, second),
        (optimizer_of(run, first), optimizer_of(run, second)),
        loader,
        scheme=run.chosen_scheme(),
        seed=run.seed,
    )
    for _ in range(run.epochs):
        for inputs, targets in loader:
            step(first, one, inputs, targets)
            step(second, two, inputs, -targets)
    return {"weights": weights(first) + weights(second)}


def train_two_alone(run, global_batch_size):
    inputs, targets = data(run)
    found = []
    for sign in (1, -1):
        model = model_of(run)
        optimizer = optimizer_of(run, model)
        for epoch in range(run.epochs):
            order = epoch_order(run, epoch)
            for start in range(0, run.samples, global_batch_size):
                part = order[start : start + global_batch_size]
                step(model, optimizer, inputs[part], sign * targets[part])
        found += weights(model)
    return found


def train_with_hook(run):
    """An averaging communication hook of the user's own, composed by the argument."""
    calls = []

    def averaging(state, bucket):
        state.append(bucket.index())
        buffer = bucket.buffer().div_(dist.get_world_size())
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda future: future.value()[0])

    run.options = {"comm_hook": (calls, averaging)}
    return {**train(run), "calls": len(calls)}


def train_and_die(run, victim, iteration, how):
    """Worker `victim` sends itself a signal in the midst of an iteration, between forward and backward."""
    model, optimizer, loader = prepared(run)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            if dist.get_rank() == victim and loader.iteration == iteration:
                os.kill(os.getpid(), getattr(signal, how))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return "survived"


def measure_and_die(run, victim):
    """Worker `victim` kills itself where the others ask for a mean over workers."""
    loader = prepared(run)[2]
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return loader.mean_over_workers(0.5, 1)


def skip_a_batch(run, worker, iteration):
    """One worker takes a batch without running backward on it."""
    model, optimizer, loader = prepared(run)
    for inputs, targets in loader:
        if dist.get_rank() == worker and loader.iteration == iteration:
            continue
        step(model, optimizer, inputs, targets)


def weigh_alone(run, worker, iteration):
    """One worker weighs a batch by units, and the others by samples."""
    model, optimizer, loader = prepared(run)
    for inputs, targets in loader:
        if dist.get_rank() == worker and loader.iteration == iteration:
            loader.weigh_by(len(inputs))
        step(model, optimizer, inputs, targets)


def skip_a_batch_and_stay_away(run, worker, iteration):
    """As before, and it stops before it looks at what the others told of the iteration after that."""
    model, optimizer, loader = prepared(run)
    for inputs, targets in loader:
        if dist.get_rank() == worker and loader.iteration == iteration:
            continue
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        if dist.get_rank() == worker and loader.iteration > iteration:
            os.kill(os.getpid(), signal.SIGSTOP)
        optimizer.step()


def start_differently(run, worker, changes):
    """One worker is started with another scheme, version, batch size or data, once for each change; what is said."""
    told = []
    version = agreement.VERSION
    for change in changes:
        mine = dict(change) if dist.get_rank() == worker else {}
        agreement.VERSION = mine.pop("version", version)
        model = torch.nn.Linear(FEATURES, mine.pop("outputs", 1)).to(run.dtype)
        if mine.pop("turned", False):
            model.weight = torch.nn.Parameter(model.weight.detach().T)
        try:
            prepared(replace(run, **mine), model=model)
        except evenstep.EvenstepError as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


class NoLength(Dataset):
    """A map-style dataset that does not say how long it is."""

    def __getitem__(self, index):
        return torch.zeros(1)


def prepare_wrongly(run, worker, mistakes):
    """The sentence with which `prepare` fails for each mistake that one worker makes in its arguments."""
    told = []
    for mistake in mistakes:
        model = model_of(run)
        arguments = {
            "model": model,
            "optimizer": optimizer_of(run, model),
            "loader": DataLoader(TensorDataset(*data(run)), batch_size=run.batch_size),
            "scheme": run.scheme,
        }
        if worker == (dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])):
            arguments |= mistake
            if mistake.get("loader") == "a dataset without a length":
                arguments["loader"] = DataLoader(NoLength(), batch_size=1, sampler=[0])
        try:
            evenstep.prepare(**arguments)
        except (evenstep.ConfigError, evenstep.DisagreementError) as error:
            told.append(str(error))
        except TypeError as error:
            told.append(f"TypeError: {error}")
    return told


def nothing_for_nan(run):
    """The idle worker of the last slice sees NaN in the copy that it computes on, and must not spread it."""
    model, optimizer, loader = prepared(run)
    idle = 0
    for _ in range(run.epochs):
        for batch, wanted in loader:
            if loader.current.samples == 0:
                idle += 1
                batch = torch.full_like(batch, float("nan"))
            step(model, optimizer, batch, wanted)
    return {"weights": weights(model), "idle": idle, "finite": bool(np.isfinite(weights(model)).all())}


def record(run, run_dir):
    run.options = {**run.options, "run_dir": Path(run_dir)}
    return train(run)


def train_with_batch_norm(run):
    """BatchNorm refuses a batch of one in training, so nobody may get one; returns the sizes computed on."""
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    model, optimizer, loader = prepared(run, model=layers.to(run.dtype))
    computed, counted = [], 0
    for _ in range(run.epochs):
        for inputs, targets in loader:
            step(model, optimizer, inputs, targets)
            computed.append(len(inputs))
            counted += loader.current.samples
    return {"computed": computed, "counted": counted}


def prepare_hooked(run):
    """A DDP model that carries somebody else's hook already."""
    model = DistributedDataParallel(model_of(run))
    model.register_comm_hook(None, allreduce_hook)
    prepared(run, model=model)


def train_twice_backward(run):
    """Two synchronised backwards in every iteration; returns the sizes of the last one."""
    model, optimizer, loader = prepared(run)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            for _ in range(2):
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return {"sizes": loader.current.sizes.tolist(), "weights": weights(model)}


def sum_both_ways(count, dtype):
    """The sum of a random tensor in one or two hops and by all_reduce, and everybody's rows."""
    workers = join_workers(torch.device("cpu"), 20.0)
    torch.manual_seed(1000 * workers.rank + count)
    mine = torch.randn(count, dtype=torch.float64).to(dtype)
    ring, large = mine.clone(), mine.clone()
    dist.all_reduce(ring)
    row, direct = [workers.rank, -7, 2**62], DirectSum(workers)
    rows = direct.sum(mine, lambda: row)
    direct.sum_larger(large, lambda: None)
    return {"equal": torch.equal(ring, mine) and torch.equal(ring, large), "rows": rows.tolist()}


def copy_prepared(run):
    """Copies and pickles of a prepared model over several workers."""
    model, optimizer, loader = prepared(run)
    for inputs, targets in loader:
        step(model, optimizer, inputs, targets)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    return torch.equal(copied(inputs), model(inputs))


def train_locally(run):
    """As `train`, but returns what each iteration was computed on, for the reference; windows run across epochs."""
    model, optimizer, loader = prepared(run)
    positions = []
    for epoch in range(run.epochs):
        for inputs, targets in loader:
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            _step_in_windows(run, optimizer, len(positions))
            share = loader.current
            positions.append((epoch, share.iteration, list(share.positions[: share.samples]), share.ends_epoch))
    momentum = [state[name].flatten().tolist() for state in optimizer.state.values() for name in sorted(state)]
    outer = {name: each.tolist() for name, each in optimizer.state.pop("outer_momentum", {}).items()}
    steps = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    return {"weights": weights(model), "positions": positions, "state": momentum, "steps": steps, "outer": outer}


def _step_in_windows(run, optimizer, before):
    if (before + 1) % run.accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()


def in_turn(calls):
    """The values of several functions with their arguments, in one start of the processes."""
    return {name: function(*arguments) for name, (function, *arguments) in calls.items()}


def spoil_a_worker(run):
    """All weights of worker 1, and its optimizer's state, are NaN after the fifth batch, as a gradient leaves them."""
    model, optimizer, loader = prepared(run)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            step(model, optimizer, inputs, targets)
            if loader.iteration == 5 and dist.get_rank() == 1:
                for parameter in model.parameters():
                    for each in (parameter.detach(), *optimizer.state[parameter].values()):
                        each.fill_(float("nan"))
    return {"weights": weights(model), "skipped": loader.engine.tracker.skipped}


def settle_and_go_on(run, stop_after):
    """As `train_and_resume`, but the same objects go on; also the weights there."""
    model, optimizer, loader = prepared(run)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            step(model, optimizer, inputs, targets)
            if loader.iteration == stop_after:
                loader.settle()
                settled = weights(model)
    return {"weights": weights(model), "settled": settled}


class Breaks(TensorDataset):
    broken = False

    def __getitem__(self, index):
        assert not self.broken, "this dataset broke"
        return super().__getitem__(index)


def settle_after_the_data_broke(run, stop_after):
    """Another batch is asked for after some, which ends their iteration, and cannot be read."""
    dataset = Breaks(*data(run))
    model, optimizer, loader = prepared(run, dataset=dataset)
    with contextlib.suppress(AssertionError):
        for inputs, targets in loader:
            step(model, optimizer, inputs, targets)
            dataset.broken = loader.iteration == stop_after
    before = weights(model)
    loader.settle()
    return {"before": before, "after": weights(model), "broke": dataset.broken}


def vector_of(worker, number, length):
    return torch.randn(length, generator=torch.Generator().manual_seed(100 * worker + number))


def sum_narrowly(wire, length, times):
    """What each of several sums of all workers' vectors comes to on a narrow wire."""
    narrow = NarrowSum(wire, dist.group.WORLD)
    return [narrow.sum(0, vector_of(dist.get_rank(), each, length)).numpy() for each in range(times)]


def train_locally_alone(run, positions_by_worker, period, outer=None):
    """Local SGD in one process: a model and an optimizer per worker, averaged every `period` iterations of an epoch.

    With options of SGD as `outer`, it steps along the mean change instead (DiLoCo).
    """
    models = [model_of(run) for _ in positions_by_worker]
    common = list(model_of(run).parameters())
    outer_optimizer = None if outer is None else torch.optim.SGD(common, **outer)
    optimizers = [optimizer_of(run, model) for model in models]
    samples = [0] * len(models)
    for iteration, ends, counts in _stepped_alone(run, positions_by_worker, models, optimizers):
        samples = [before + count for before, count in zip(samples, counts, strict=True)]
        if (iteration + 1) % period == 0 or ends:
            shares = [count / sum(samples) for count in samples]
            if outer_optimizer is None:
                _average(models, optimizers, shares)
            else:
                _step_outer(models, shares, common, outer_optimizer)
            samples = [0] * len(models)
    return weights(models[0])


def _stepped_alone(run, positions_by_worker, models, optimizers):
    """After a step of each worker: the iteration, whether its epoch ends, and the samples of each worker."""
    inputs, targets = data(run)
    for before, together in enumerate(zip(*positions_by_worker, strict=True)):
        epoch, iteration, _, ends = together[0]
        parts = [epoch_order(run, epoch)[positions] for _, _, positions, _ in together]
        for model, optimizer, part in zip(models, optimizers, parts, strict=True):
            if len(part):
                torch.nn.functional.mse_loss(model(inputs[part]), targets[part]).backward()
            _step_in_windows(run, optimizer, before)
        yield iteration, ends, [len(part) for part in parts]


def stream_alone(run, positions_by_worker, period, cut, alpha, delay=0):
    """Streaming DiLoCo in one process, with Nesterov's momentum written out; `cut` has the fragment of each tensor."""
    models = [model_of(run) for _ in positions_by_worker]
    common = [parameter.detach().clone() for parameter in model_of(run).parameters()]
    momenta = [torch.zeros_like(tensor) for tensor in common]
    samples = np.zeros((len(models), max(cut) + 1))
    changes, sent = {}, {}
    optimizers = [optimizer_of(run, model) for model in models]
    for iteration, ends, counts in _stepped_alone(run, positions_by_worker, models, optimizers):
        samples += np.array(counts)[:, None]
        for number, fragment in enumerate(cut):
            mine = [list(model.parameters())[number].data for model in models]
            place, last = fragment * period // (max(cut) + 1), number + 1 == len(cut) or cut[number + 1] != fragment
            if ends and fragment in sent:  # What is under way at the end of an epoch is not used.
                samples[:, fragment] += sent[fragment]
                del sent[fragment]
            if ends or (iteration + 1 + delay) % period == place:
                counted = samples[:, fragment]
                change = sum(n * (common[number] - each) for n, each in zip(counted, mine, strict=True))
                changes[number] = change / counted.sum()
                if last:
                    sent[fragment] = counted.copy()
                    samples[:, fragment] = 0
            if ends or ((iteration + 1) % period == place and number in changes):
                change = changes.pop(number)
            else:
                continue
            if last:
                del sent[fragment]
            momenta[number] = 0.9 * momenta[number] + change
            common[number] = common[number] - 0.7 * (change + 0.9 * momenta[number])
            for each in mine:
                each.copy_(common[number] if ends else alpha * each + (1 - alpha) * common[number])
    return [weights(model) for model in models]


def train_by_steps(run, fetch):
    """Returns the weights, and the samples of each batch, by epoch and iteration."""
    dataset = TensorDataset(*data(run), torch.arange(run.samples))
    model, optimizer, loader = prepared(run, dataset=dataset)
    taken = []
    for epoch in range(run.epochs):
        for inputs, targets, numbers in fetch(loader):
            step(model, optimizer, inputs, targets)
            own = sorted(set(numbers.tolist())) if loader.current.samples else []
            taken.append((epoch, loader.current.iteration, own))
    return {"weights": weights(model), "taken": taken}


def train_steps_alone(run, taken_by_worker, outer):
    """DiLoCo with steps by speed in one process: all steps of a worker in an iteration, then an outer step."""
    models = [model_of(run) for _ in taken_by_worker]
    optimizers = [optimizer_of(run, model) for model in models]
    common = list(model_of(run).parameters())
    outer_optimizer = torch.optim.SGD(common, **outer)
    inputs, targets = data(run)
    for place in sorted({each[:2] for each in taken_by_worker[0]}):
        samples = [0] * len(models)
        for worker, taken in enumerate(taken_by_worker):
            for own in (each[2] for each in taken if each[:2] == place and each[2]):
                samples[worker] += len(own)
                step(models[worker], optimizers[worker], inputs[own], targets[own])
        _step_outer(models, [count / sum(samples) for count in samples], common, outer_optimizer)
    return weights(models[0])


def settle_after_a_batch(run):
    model, optimizer, loader = prepared(run)
    for inputs, targets in loader:
        step(model, optimizer, inputs, targets)
        loader.settle()


def _step_outer(models, shares, common, outer_optimizer):
    for parameter, alike in zip(common, zip(*(model.parameters() for model in models), strict=True), strict=True):
        mean = sum(share * tensor.detach() for share, tensor in zip(shares, alike, strict=True))
        parameter.grad = parameter.detach() - mean
    outer_optimizer.step()
    for model in models:
        for parameter, tensor in zip(common, model.parameters(), strict=True):
            tensor.data.copy_(parameter.data)


def _average(models, optimizers, shares):
    with torch.no_grad():
        kinds = [list(model.parameters()) for model in models]
        for alike in zip(*kinds, strict=True):
            mean = sum(share * tensor for share, tensor in zip(shares, alike, strict=True))
            states = [optimizer.state[tensor] for optimizer, tensor in zip(optimizers, alike, strict=True)]
            for tensor in alike:
                tensor.copy_(mean)
            for name in states[0]:
                if name == "step":
                    # Those who had nothing to compute on are behind.
                    most = max(state["step"].item() for share, state in zip(shares, states, strict=True) if share)
                    for state in states:
                        state["step"].fill_(most)
                else:
                    mean = sum(share * state[name] for share, state in zip(shares, states, strict=True))
                    for state in states:
                        state[name] = mean.clone()


class Refetched(DataLoader):
    """A loader with a loop of its own, as PyG's NeighborLoader and torchdata's StatefulDataLoader."""

    def _get_iterator(self):
        return super()._get_iterator()


def closure_of(model, optimizer, inputs, targets):
    """What computes the loss and its gradients, for `optimizer.step`."""

    def closure():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    return closure


def train_in_micro_batches(run, habit):
    """An ordinary loop over micro-batches, in one of the habits that scripts have; schedulers step per batch."""
    model = model_of(run)
    optimizer = optimizer_of(run, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    run.options = {**run.options, "schedulers": scheduler}
    pads = {"collate_fn": stacked} if isinstance(run.options.get("cost"), evenstep.Padded) else {}
    loader = DataLoader(
        TensorDataset(*data(run)), batch_size=run.batch_size, shuffle=True, num_workers=run.num_workers, **pads
    )
    model, optimizer, loader = evenstep.prepare(
        model, optimizer, loader, scheme=run.chosen_scheme(), seed=run.seed, **run.options
    )
    largest, batches, costliest, first = 0, 0, 0.0, {}
    for _ in range(run.epochs):
        for inputs, targets in loader:
            batches += 1
            largest = max(largest, len(inputs))
            costliest = max(costliest, loader.newest.cost or 0.0)
            first.setdefault(tuple(loader.batch_sizes), loader.current.iteration)
            if habit == "zero first":
                step(model, optimizer, inputs, targets)
            elif habit == "zero last":
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
            elif habit == "zero the model":
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                model.zero_grad()
                loss.backward()
                optimizer.step()
            elif habit == "step where it synchronises":
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                if loader.synchronises:
                    optimizer.step()
            elif habit == "a closure":
                optimizer.step(closure_of(model, optimizer, inputs, targets))
            scheduler.step()
    return {
        "weights": weights(model),
        "iterations": loader.iteration,
        "batches": batches,
        "largest": largest,
        "costliest": costliest,
        "moved": min([number for number in first.values() if number], default=None),
        "rate": optimizer.param_groups[0]["lr"],
    }


def train_scheduled_alone(run, global_batch_size):
    """One process with the scheduler that steps in every iteration."""
    model = model_of(run)
    optimizer = optimizer_of(run, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    inputs, targets = data(run)
    for epoch in range(run.epochs):
        order = epoch_order(run, epoch)
        for start in range(0, run.samples, global_batch_size):
            part = order[start : start + global_batch_size]
            step(model, optimizer, inputs[part], targets[part])
            scheduler.step()
    return {"weights": weights(model), "rate": optimizer.param_groups[0]["lr"]}


def misuse_micro_batches(run, misuse):
    """Micro-batches with something that cannot work with them."""
    model = model_of(run)
    optimizer = original = optimizer_of(run, model)
    if misuse == "a scheduler that prepare does not know":
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
    loader = DataLoader(TensorDataset(*data(run)), batch_size=run.batch_size, shuffle=True)
    model, optimizer, loader = evenstep.prepare(
        model, optimizer, loader, scheme=run.chosen_scheme(), seed=run.seed, **run.options
    )
    if misuse == "a scheduler built afterwards":
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        if misuse == "two backwards":
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
        (original if misuse == "the optimizer of before" else optimizer).step()


def train_unweighted_alone(run, positions_by_worker):
    """One process that averages the workers' mean gradients without weights, as the code of DBS's time did."""
    model = model_of(run)
    optimizer = optimizer_of(run, model)
    inputs, targets = data(run)
    for together in zip(*positions_by_worker, strict=True):
        parts = [epoch_order(run, epoch)[positions] for epoch, _, positions, _ in together if positions]
        losses = [torch.nn.functional.mse_loss(model(inputs[part]), targets[part]) for part in parts]
        optimizer.zero_grad()
        (sum(losses) / len(losses)).backward()
        optimizer.step()
    return weights(model)


def train_batch_norm_locally(run):
    """Parameters and running statistics after local SGD on a model with BatchNorm."""
    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(FEATURES, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    model, optimizer, loader = prepared(run, model=layers.to(run.dtype))
    for _ in range(run.epochs):
        for inputs, targets in loader:
            step(model, optimizer, inputs, targets)
    norm = model.module[1]
    return weights(model) + norm.running_mean.tolist() + norm.running_var.tolist()


def save_scheduler(run):
    """The state of a scheduler that waits for micro-batches, through a pickle and into another one."""
    model = model_of(run)
    optimizer = optimizer_of(run, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    loader = DataLoader(TensorDataset(*data(run)), batch_size=run.batch_size)
    model, optimizer, loader = evenstep.prepare(
        model, optimizer, loader, scheme=run.chosen_scheme(), schedulers=[scheduler]
    )
    for inputs, targets in loader:
        step(model, optimizer, inputs, targets)
        scheduler.step()
    state = pickle.loads(pickle.dumps(scheduler.state_dict()))
    scheduler.load_state_dict(state)
    return {"epoch": state["last_epoch"], "iterations": loader.iteration}


def skip_a_step(run, iteration):
    """A script that steps on no gradient of one iteration, as where a norm is not finite, and goes on."""
    model, optimizer, loader = prepared(run)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            if loader.synchronises and loader.iteration == iteration:
                continue
            optimizer.step()
    return {"weights": weights(model)}


def skip_a_step_alone(run, global_batch_size, iteration):
    model = model_of(run)
    optimizer = optimizer_of(run, model)
    inputs, targets = data(run)
    done = 0
    for epoch in range(run.epochs):
        order = epoch_order(run, epoch)
        for start in range(0, run.samples, global_batch_size):
            part = order[start : start + global_batch_size]
            done += 1
            if done != iteration:
                step(model, optimizer, inputs[part], targets[part])
    return weights(model)


def leave_between_micro_batches(run):
    """Leaves the loop at the first micro-batch, and begins another."""
    model, optimizer, loader = prepared(run)
    for inputs, targets in loader:
        step(model, optimizer, inputs, targets)
        break
    for inputs, targets in loader:
        step(model, optimizer, inputs, targets)


def settle_in_mid_window(run, iteration):
    """Leaves the loop between two averages; returns this worker's weights before it settles, and after."""
    model, optimizer, loader = prepared(run)
    for inputs, targets in loader:
        step(model, optimizer, inputs, targets)
        if loader.iteration == iteration:
            break
    before = weights(model)
    loader.settle()
    state = loader.state_dict()
    return {"before": before, "after": weights(model), "iteration": state["iteration"]}


def look_at_sizes_after_resuming(run, stop_after):
    """Resumes in mid-epoch; only worker 0 looks at the sizes before it goes on."""
    model, optimizer, loader = prepared(run)
    for epoch in range(run.epochs):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            step(model, optimizer, inputs, targets)
            if loader.iteration == stop_after:
                break
        if loader.iteration == stop_after:
            break
    state, sizes = loader.state_dict(), loader.current.sizes.tolist()
    model, optimizer, loader = prepared(run)
    loader.load_state_dict(state)
    if dist.get_rank() == 0:
        assert loader.batch_sizes == sizes
    for inputs, targets in loader:
        step(model, optimizer, inputs, targets)
        assert loader.current.sizes.tolist() == sizes or loader.current.ends_epoch
    return {"sizes": sizes}


def accumulate(run, habit, accumulation):
    """A script that accumulates batches of the loader's own size and divides its loss by their number."""
    model = model_of(run)
    model.register_buffer("scale", torch.ones(1))  # DistributedDataParallel broadcasts it.
    optimizer = optimizer_of(run, model)
    loader = DataLoader(TensorDataset(*data(run)), batch_size=run.batch_size, shuffle=True)
    model, optimizer, loader = evenstep.prepare(
        model,
        optimizer,
        loader,
        scheme=run.chosen_scheme(),
        seed=run.seed,
        accumulation=accumulation,
        **run.options,
    )
    batches, done = [], 0
    for _ in range(run.epochs):
        for inputs, targets in loader:
            batches.append((loader.current.iteration, len(inputs)))
            done += 1
            if habit in ("steps in every pass", "tokens"):
                optimizer.zero_grad()
            counted = habit == "counts by itself" and done % accumulation
            with model.no_sync() if counted or habit == "no_sync everywhere" else contextlib.nullcontext():
                (loss_by_units(model, loader, inputs, targets, habit, done) / accumulation).backward()
            if habit == "averages in every pass":
                loader.mean_over_workers(0.0, len(inputs))
            if habit == "sums in every pass":
                dist.all_reduce(torch.zeros(1))
            if habit in ("steps in every pass", "tokens"):
                optimizer.step()
            elif habit == "counts by itself" and not counted:
                optimizer.step()
                optimizer.zero_grad()
            elif habit != "counts by itself" and loader.synchronises:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
                optimizer.step()
                optimizer.zero_grad()
    return {"weights": weights(model), "batches": batches, "sizes": loader.batch_sizes}


def loss_by_units(model, loader, inputs, targets, habit, done):
    """The mean of a batch by the samples, or by the units if that is the habit, of which the loader is told."""
    units = units_of(inputs) if habit.startswith("tokens") else torch.ones_like(targets)
    if habit == "tokens before the model":
        loader.weigh_by(units.sum())
    error = (model(inputs) - targets) ** 2
    if habit in ("tokens", "tokens where it synchronises") or (habit == "tokens of a few" and done % 2 == 0):
        loader.weigh_by(units.sum())
    return (units * error).sum() / units.sum()


def scale_in_windows(run, accumulation, overflows=None):
    """`accumulate` under a GradScaler that is used where the loader synchronises; in that iteration the loss is inf."""
    model = model_of(run)
    optimizer = optimizer_of(run, model)
    loader = DataLoader(TensorDataset(*data(run)), batch_size=run.batch_size, shuffle=True)
    model, optimizer, loader = evenstep.prepare(
        model, optimizer, loader, scheme=run.chosen_scheme(), seed=run.seed, accumulation=accumulation
    )
    scaler, steps = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3), []
    optimizer.register_step_post_hook(lambda *_: steps.append(loader.iteration))
    for _ in range(run.epochs):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets) / accumulation
            scaler.scale(loss * torch.inf if loader.synchronises and loader.iteration == overflows else loss).backward()
            if loader.synchronises:
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return {"weights": weights(model), "steps": steps}
