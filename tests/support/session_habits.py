"""What frameworks do with a session: parts in any order, wrappers around them, loaders that are not used, closures."""

import copy
import os
import warnings

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import evenstep
from support import training
from support.ahead_habits import ahead
from support.habits import batches, loader_of, ordinary, weights


def train(run, model, optimizer, loader, epochs=None):
    for _ in range(run.epochs if epochs is None else epochs):
        for inputs, targets in loader:
            training.step(model, optimizer, inputs, targets)
    return weights(model)


def plainly(run, prepare):
    return train(run, *ordinary(run, prepare))


def in_another_order(run, **options):
    """The loader first, as the Hugging Face Trainer; the length before there is a model, as Lightning."""
    model = training.model_of(run)
    with evenstep.Session(seed=run.seed, timeout=20.0, **options) as session:
        loader = session.loader(loader_of(run))
        loader.set_epoch(1)
        loader.set_epoch(0)
        before = [loader.epoch, len(loader), loader.global_batch_size, loader.batch_size, loader.num_workers]
        optimizer, prepared = session.optimizer(training.optimizer_of(run, model)), session.model(model)
        found = train(run, prepared, optimizer, loader)
        known = isinstance(prepared, DistributedDataParallel), list(prepared.state_dict())
        rank = torch.distributed.get_rank()
        rows = session.gather(torch.full((rank, 2), float(rank)))
        mean = session.mean_over_workers(float(rank), rank)
        return {
            "rows": rows.tolist(),
            "scalars": session.gather(torch.tensor(rank)).tolist(),
            "mean": mean,
            "weights": found,
            "before": before,
            "after": len(loader),
            "known": known,
        }


def twice(run, **options):
    """Two sessions over the same model and optimizer, one after the other."""
    model = training.model_of(run)
    optimizer = training.optimizer_of(run, model)
    for epoch in range(run.epochs):
        prepared, stepped, loader = evenstep.prepare(
            model, optimizer, loader_of(run), seed=run.seed, timeout=20.0, **options
        )
        loader.set_epoch(epoch)
        train(run, prepared, stepped, loader, epochs=1)
        loader.close()
    return weights(model)


def peek(run, **options):
    model = training.model_of(run)
    prepared, optimizer, loader = _prepare(run, model, options)
    with loader:
        next(iter(loader))
        assert len(list(loader)) == len(loader)
        assert loader.epoch == 0
        return train(run, prepared, optimizer, loader)


def normalise_globally(run, **options):
    """A loss that is divided by the samples of all workers, times their number, as under DistributedDataParallel."""
    model = training.model_of(run)
    prepared, optimizer, loader = _prepare(run, model, {**options, "weights": "script"})
    with loader:
        for inputs, targets in batches(run, loader):
            optimizer.zero_grad()
            loss = mse_loss(prepared(inputs), targets, reduction="sum") / targets[0].numel()
            (loss * 3.0 / int(loader.current.sizes.sum())).backward()
            optimizer.step()
        return weights(model)


def restore_the_optimizer_first(run, **options):
    """Through torch's own checkpoints, which step an optimizer without state, with a rate of 0."""
    model = training.model_of(run)
    prepared, optimizer, loader = _prepare(run, model, options)
    with loader:
        state = get_optimizer_state_dict(model, optimizer)
        assert set_optimizer_state_dict(model, optimizer, state) is None
        return train(run, prepared, optimizer, loader)


def said(act, *arguments):
    try:
        act(*arguments)
    except evenstep.EvenstepError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def mistakes(run, **options):
    """What is said of each habit that cannot work, and how far weights have moved by then."""
    found = {}
    for mistake in MISTAKES:
        model = training.model_of(run)
        before = weights(model)
        found[mistake.__name__] = mistake(run, model, options), weights(model) == before
    return found


def _prepare(run, model, options, loader=None):
    optimizer = training.optimizer_of(run, model)
    given = loader_of(run) if loader is None else loader
    return evenstep.prepare(model, optimizer, given, seed=run.seed, timeout=20.0, **options)


def in_a_wrapper_of_ones_own(run, **options):
    """The script calls its own DistributedDataParallel, with batches fetched ahead, in two sessions."""
    own = DistributedDataParallel(training.model_of(run))
    optimizer = training.optimizer_of(run, own)
    for epoch in range(run.epochs):
        prepared, stepped, loader = evenstep.prepare(
            own, optimizer, loader_of(run), seed=run.seed, timeout=20.0, **options
        )
        with loader:
            assert isinstance(copy.deepcopy(own).module, torch.nn.Sequential)
            loader.set_epoch(epoch)
            for inputs, targets in ahead(loader, 2):
                training.step(prepared, stepped, inputs, targets)
            stays = prepared is own and "pass the model to the loop as it is" in said(DistributedDataParallel, own)
    return {"weights": weights(own), "stays": stays}


def wrap_again(run, model, options):
    prepared, _, loader = _prepare(run, model, options)
    with loader:
        return said(DistributedDataParallel, prepared)


def use_another_loader(run, model, options):
    prepared, optimizer, loader = _prepare(run, model, options)
    with loader:
        return said(train, run, prepared, optimizer, loader_of(run))


def use_another_after_a_peek(run, model, options):
    """This cannot be told from several steps on the batch that was looked at, so it is a warning."""
    prepared, optimizer, loader = _prepare(run, model, options)
    before = copy.deepcopy(model.state_dict())
    with loader, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        next(iter(loader))
        train(run, prepared, optimizer, loader_of(run), epochs=1)
        model.load_state_dict(before)
    return " ".join({str(each.message) for each in caught})


def use_another_before_the_start(run, model, options):
    with evenstep.Session(timeout=20.0, **options) as session:
        session.loader(loader_of(run))
        optimizer, prepared = session.optimizer(training.optimizer_of(run, model)), session.model(model)
        return said(train, run, prepared, optimizer, loader_of(run))


def bring_a_loop(run, model, options):
    data = torch.utils.data.TensorDataset(*training.data(run))
    return said(_prepare, run, model, options, training.Refetched(data, batch_size=run.batch_size))


def part_in_a_closure(run, model, options):
    """Worker 2 steps at another rate."""
    prepared, optimizer, loader = _prepare(run, model, options)
    if torch.distributed.get_rank() == 2:
        optimizer.param_groups[0]["lr"] *= 0.5

    def step(inputs, targets):
        optimizer.step(training.closure_of(prepared, optimizer, inputs, targets))

    with loader:
        return said(lambda: [step(inputs, targets) for inputs, targets in loader])


ACTS = (
    in_another_order,
    in_a_wrapper_of_ones_own,
    twice,
    peek,
    normalise_globally,
    restore_the_optimizer_first,
    mistakes,
)


MISTAKES = (
    wrap_again,
    use_another_loader,
    use_another_after_a_peek,
    use_another_before_the_start,
    bring_a_loop,
    part_in_a_closure,
)


def together(run, schemes):
    """What each of these comes to under each scheme, by both names; an error is text."""
    return {(name, act.__name__): attempt(act, run, options) for name, options in schemes.items() for act in ACTS}


def attempt(act, run, options):
    try:
        return act(run, **options)
    except evenstep.EvenstepError as error:
        return f"{type(error).__name__}: {error}"


def on_servers(run, scheme):
    """A peek, mistakes that are refused, and then epochs whose steps have closures; what came of each."""
    model = training.model_of(run)
    before, another = weights(model), loader_of(run)
    with evenstep.Session(scheme, seed=run.seed) as session:
        loader, prepared = session.loader(loader_of(run)), session.model(model)
        optimizer = session.optimizer(training.optimizer_of(run, model))
        session.start()
        refused = said(train, run, prepared, optimizer, another)
        found = {"refused": refused, "unchanged": weights(model) == before, "positions": []}
        if not scheme.startswith("ssp") or os.environ["RANK"] == "1":  # Alone, where no barrier waits.
            next(iter(loader))
        found["peeked"] = loader.epoch
        for _ in range(run.epochs):
            found["positions"].append([])
            for inputs, targets in loader:
                optimizer.step(training.closure_of(prepared, optimizer, inputs, targets))
                found["positions"][-1] += loader.current.positions[: loader.current.samples]
        return {**found, "weights": weights(model)}
