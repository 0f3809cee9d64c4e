"""Scripts with a habit or a mistake, for the workers of runs on servers; each function returns plain values."""

import math
import os
import tempfile
import threading
import warnings

import torch
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.core.errors import EvenstepError
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.schemes import Served
from evenstep.torch.processes.join_servers import join_servers
from evenstep.torch.processes.workers import gather
from evenstep.worker.activity import Activity
from support import served_training, training
from support.training import step, weights


def train_with_nans(run, victim, iterations):
    """The victim's gradient holds a NaN in these iterations (from 1); what it was warned of, and the last weights."""
    model, optimizer, loader, _ = served_training.prepared(run)
    done = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(run.epochs):
            for inputs, targets in loader:
                done += 1
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                if done in iterations and int(os.environ["RANK"]) == victim:
                    next(model.parameters()).grad.view(-1)[0] = math.nan
                optimizer.step()
    return {
        "weights": weights(model),
        "warned": [str(each.message) for each in caught if "NaN" in str(each.message)],
        "skipped": loader.statistics().skipped,
    }


def one_prepares_wrongly(run, worker, mistake):
    """One worker makes a mistake in its arguments."""
    if int(os.environ["RANK"]) == worker:
        for name, value in mistake.items():
            setattr(run, name, value)
    served_training.prepared(run)


def train_apart(run):
    """At a learning rate at which the weights leave what a float can hold."""
    model, optimizer, loader, _ = served_training.prepared(run)
    for group in optimizer.param_groups:
        group["lr"] = 50_000.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of what is left out at first.
        for _ in range(run.epochs):
            for inputs, targets in loader:
                training.step(model, optimizer, inputs, targets)


def train_clipping(run):
    """A script that clips by itself; what it was warned of."""
    model, optimizer, loader, _ = served_training.prepared(run)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    return [str(each.message) for each in caught if "clip" in str(each.message)]


def train_with_a_loss_scale(run, victim, iterations, clip=None):
    """A GradScaler, which overflows on the victim in these iterations (from 1); every other gradient is unscaled."""
    model = training.model_of(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=run.optimizer == "fused")
    loader = DataLoader(TensorDataset(*training.data(run)), batch_size=run.batch_size, shuffle=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme=run.scheme)
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0)
        done = 0
        for _ in range(run.epochs):
            for inputs, targets in loader:
                done += 1
                overflows = done in iterations and int(os.environ["RANK"]) == victim
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                scaler.scale(loss * (math.inf if overflows else 1)).backward()
                if done % 2 or clip is not None:
                    scaler.unscale_(optimizer)
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
    return {
        "weights": weights(model),
        "warned": [str(each.message) for each in caught],
        "scale": scaler.get_scale(),
    }


def measure(run):
    """A mean over workers of their ranks, and what was warned of."""
    _, _, loader, _ = served_training.prepared(run)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mean = loader.mean_over_workers(float(os.environ["RANK"]), 0)
    return {"mean": mean, "warned": [str(each.message) for each in caught]}


def train_clipped_alone(run, most, global_batch_size):
    """One process, whose gradient's norm is clipped; the weights after each epoch."""
    model = training.model_of(run)
    optimizer = served_training.optimizer_of(run, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    inputs, targets = training.data(run)
    ended, clipped = [], 0
    for epoch in range(run.epochs):
        order = training.epoch_order(run, epoch)
        for start in range(0, run.samples, global_batch_size):
            part = order[start : start + global_batch_size]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[part]), targets[part]).backward()
            # Not clip_grad_norm_, which adds 1e-6 to the norm.
            norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
            for parameter in model.parameters():
                parameter.grad *= min(1.0, most / norm)
            clipped += norm > most
            optimizer.step()
        scheduler.step()
        ended.append(weights(model))
    return ended, clipped


def train_by_habit(run, skips=()):
    """Steps once for `run.accumulate` batches, and not at all after the iterations (from 1) in `skips`."""
    model, optimizer, loader, scheduler = served_training.prepared(run)
    done, ended, positions = 0, [], []
    for _ in range(run.epochs):
        positions.append([])
        for inputs, targets in loader:
            done += 1
            if (done - 1) % run.accumulate == 0:
                optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            positions[-1].append(served_training.seen(loader))
            if done % run.accumulate == 0 and done not in skips:
                optimizer.step()
        scheduler.step()
        ended.append(weights(model))
    return {"ended": ended, "positions": positions}


def train_by_habit_alone(run, global_batch_size, skips=()):
    """The same in one process."""
    model = training.model_of(run)
    optimizer = served_training.optimizer_of(run, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    inputs, targets = training.data(run)
    done, ended = 0, []
    for epoch in range(run.epochs):
        order = training.epoch_order(run, epoch)
        for start in range(0, run.samples, global_batch_size):
            part = order[start : start + global_batch_size]
            done += 1
            if (done - 1) % run.accumulate == 0:
                optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs[part]), targets[part]).backward()
            if done % run.accumulate == 0 and done not in skips:
                optimizer.step()
        scheduler.step()
        ended.append(weights(model))
    return ended


def break_then_train(run, leaver):
    """One worker leaves its first loop at its second batch; two whole epochs follow."""
    model, optimizer, loader, _ = served_training.prepared(run)
    positions = []
    for epoch in range(3):
        positions.append([])
        for number, (inputs, targets) in enumerate(loader):
            if epoch == 0 and number == 1 and int(os.environ["RANK"]) == leaver:
                break
            step(model, optimizer, inputs, targets)
            positions[-1].append(served_training.seen(loader))
    return {"positions": positions, "weights": weights(model)}


def set_other_epochs(run, odd):
    """One worker calls set_epoch with another number."""
    model, optimizer, loader, _ = served_training.prepared(run)
    loader.set_epoch(7 if int(os.environ["RANK"]) == odd else 3)
    for inputs, targets in loader:
        step(model, optimizer, inputs, targets)


def describe_other_models(run, odd):
    """One worker's model has as many parameters in another shape."""
    model = training.model_of(run)
    if int(os.environ["RANK"]) == odd:
        model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()[:1]
        model.append(torch.nn.Linear(8, 1)).append(torch.nn.Linear(7, 1)).double()
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in training.model_of(run).parameters())
    return training.prepared(run, model=model) is None


def meet_under_torchrun(temporary):
    """Joins as under plain torchrun, without a launcher of ours; what this worker has learnt, when all have."""
    tempfile.tempdir = temporary
    joined = join_servers(LaunchSettings(), Served(), 30.0, None, Activity())
    values = gather(joined.workers, {"rank": joined.workers.rank})
    keeping = [thread.daemon for thread in threading.enumerate() if thread.name == "evenstep-hosting"]
    joined.link.close()
    met = [each["rank"] for each in values]
    return {"secret": joined.secret, "addresses": joined.addresses, "met": met, "keeping": keeping}


def step_at_another_rate(run, odd):
    """One worker's optimizer begins at another learning rate."""
    model = training.model_of(run)
    optimizer = training.optimizer_of(run, model)
    optimizer.param_groups[0]["lr"] *= 1 + (int(os.environ["RANK"]) == odd)
    loader = DataLoader(TensorDataset(*training.data(run)), batch_size=run.batch_size)
    evenstep.prepare(model, optimizer, loader, scheme=run.scheme)


def misuse(run, mistake):
    """A mistake that one worker alone can make; the sentence it is answered with."""
    model, optimizer, loader, _ = served_training.prepared(run)
    own = getattr(optimizer, "_optimizer", optimizer)
    another = torch.optim.SGD(own.param_groups[0]["params"], lr=0.05)
    try:
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            if mistake == "their own optimizer":
                own.step()
            elif mistake == "another optimizer":
                another.step()
            elif mistake == "another param group":
                optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
            elif mistake == "two steps":
                optimizer.step()
                optimizer.step()
    except EvenstepError as error:
        return f"{type(error).__name__}: {error}"
    return None


def prepare_wrongly(run, mistake):
    """Something that `prepare` cannot work with."""
    model = training.model_of(run)
    optimizer = training.optimizer_of(run, model)
    options = {}
    if mistake == "several models":
        other = training.model_of(run)
        model, optimizer = (model, other), (optimizer, training.optimizer_of(run, other))
    elif mistake == "a comm_hook":
        options["comm_hook"] = (None, lambda state, bucket: None)
    elif mistake == "weights of the script":
        options["weights"] = "script"
    elif mistake == "LBFGS":
        optimizer = torch.optim.LBFGS(model.parameters())
    elif mistake == "a lazy model":
        model.append(torch.nn.LazyLinear(1))
    loader = DataLoader(TensorDataset(*training.data(run)), batch_size=run.batch_size)
    if mistake == "a batch sampler":
        loader = DataLoader(loader.dataset, batch_sampler=[[0, 1], [2]])
    elif mistake == "a loader with its own loop":
        loader = training.Refetched(loader.dataset, batch_size=run.batch_size)
    evenstep.prepare(model, optimizer, loader, scheme=run.scheme, **options)


def join_incompletely(missing):
    """torchrun's environment without one of its variables."""
    given = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.environ.update({name: value for name, value in given.items() if name != missing})
    del os.environ["EVENSTEP_LAUNCH"]
    os.environ.pop(missing, None)
    prepare_wrongly(training.Run(scheme="asp"), "nothing")
