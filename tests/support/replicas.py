"""Scripts that change something on worker 1 alone."""

import gc
import weakref

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from support.losses import data, model_of

WORKERS = 3


def load_weights(iteration, model, optimizer):
    if iteration == 5:
        model.load_state_dict(model_of().state_dict(), strict=False)


def zero_gradients(iteration, model, optimizer):
    if iteration == 5:
        optimizer.zero_grad()


def halve_momentum(iteration, model, optimizer):
    if iteration == 5:
        for state in optimizer.state.values():
            state["momentum_buffer"] *= 0.5


def add_noise(iteration, model, optimizer):
    with torch.no_grad():
        model[2].bias += 0.001


def other_weight_decay(iteration, model, optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0.1


def scale_frozen(iteration, model, optimizer):
    with torch.no_grad():
        model[3].weight *= 1.01


def zero_one_row(iteration, model, optimizer):
    if iteration == 1:
        with torch.no_grad():
            model[4].weight[777] = 0


def change_at_the_end(iteration, model, optimizer):
    if iteration == 16:
        optimizer.zero_grad()


def round_otherwise(iteration, model, optimizer):
    with torch.no_grad():
        for each in model.parameters():
            each *= 1 + 1e-7


ALONE = {
    each.__name__: each
    for each in (
        load_weights, zero_gradients, halve_momentum, add_noise, other_weight_decay, scale_frozen, zero_one_row,
        change_at_the_end,
    )
}  # fmt: skip


class Model(torch.nn.Sequential):
    """A model with parameters that are frozen, that are no part of the loss, and that belong to one worker."""

    _ddp_params_and_buffers_to_ignore = ("5.weight",)

    def __init__(self):
        own = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(own.weight, dist.get_rank())
        conjugated = torch.nn.Linear(2, 2, dtype=torch.complex64)
        conjugated.weight = torch.nn.Parameter(conjugated.weight.detach().conj())
        super().__init__(
            *model_of(), torch.nn.Linear(3, 3).double(), torch.nn.Embedding(1000, 16), own,
            conjugated,
        )  # fmt: skip
        for part in list(self)[3:]:
            part.requires_grad_(False)

    def forward(self, features):
        return self[2](self[1](self[0](features)))


def together():
    """By change: the sentence that ended the run, or None; and, the same on every worker, the iteration of its end."""
    return {name: trained(change) for name, change in {**ALONE, "round_otherwise": round_otherwise}.items()}


def trained(change):
    dist.is_initialized() or dist.init_process_group("gloo")
    model, batches = Model(), 0
    optimizer = torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(*data()), batch_size=8)
    prepared, optimizer, loader = evenstep.prepare(model, optimizer, loader, batch_sizes=[12, 9, 3], timeout=60.0)
    with loader:
        try:
            for _ in range(4):
                for features, labels in loader:
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(prepared(features), labels).backward()
                    batches += 1
                    if dist.get_rank() == 1:
                        change(batches, model, optimizer)
                    optimizer.step()
        except evenstep.DisagreementError as error:
            return str(error), batches
    return None, batches


def save_apart(folder):
    """The sentence that keeps a script from saving a checkpoint of replicas that have parted, and what is saved."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*data()), batch_size=8)
    prepared, optimizer, loader = evenstep.prepare(model, optimizer, loader, batch_sizes=[12, 9, 3], timeout=60.0)
    with loader:
        features, labels = next(iter(loader))
        torch.nn.functional.cross_entropy(prepared(features), labels).backward()
        optimizer.step()
        if dist.get_rank() == 1:
            add_noise(1, model, optimizer)
        try:
            evenstep.checkpoint.save(folder, prepared, optimizer, loader)
        except evenstep.DisagreementError as error:
            return str(error), evenstep.checkpoint.restore(folder, prepared, optimizer, loader)
    return None, None


def go_on_after_it():
    """The number of iterations that a script does which passes over every error, and of errors."""
    model, errors, steps = model_of(), 0, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*data()), batch_size=8)
    prepared, optimizer, loader = evenstep.prepare(model, optimizer, loader, batch_sizes=[12, 9, 3], timeout=60.0)
    with loader:
        try:
            for features, labels in loader:
                torch.nn.functional.cross_entropy(prepared(features), labels).backward()
                if dist.get_rank() == 1:
                    add_noise(1, model, optimizer)
                try:
                    optimizer.step()
                    steps += 1
                except evenstep.EvenstepError:
                    errors += 1
        except evenstep.EvenstepError:
            errors += 1
    return steps, errors


def let_go():
    """Whether the engine of a closed run is gone as soon as nothing of the script refers to it, with no collector."""
    gc.disable()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*data()), batch_size=8)
    prepared, optimizer, loader = evenstep.prepare(model, optimizer, loader, timeout=60.0)
    with loader:
        for features, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(prepared(features), labels).backward()
            optimizer.step()
    engine = weakref.ref(loader.engine)
    del prepared, optimizer, loader
    return engine() is None


def by_hand():
    """The sentence about gradients that a script sets by hand, and the iteration in which it came."""
    model = model_of()
    optimizer, iteration = torch.optim.SGD(model.parameters(), lr=0.1), 0
    loader = DataLoader(TensorDataset(*data()), batch_size=8)
    _, optimizer, loader = evenstep.prepare(model, optimizer, loader, batch_sizes=[12, 9, 3], timeout=60.0)
    with loader:
        try:
            for features, _ in loader:
                iteration += 1
                for each in model.parameters():
                    each.grad = torch.full_like(each, features.mean().item())
                optimizer.step()
        except evenstep.ConfigError as error:
            loader.close()
            return str(error), iteration
    return None, iteration


def compiled_with_its_backward():
    """The iterations of a script that compiles forward, loss and backward as one function."""
    model, iterations = model_of(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*data()), batch_size=8)
    prepared, optimizer, loader = evenstep.prepare(model, optimizer, loader, batch_sizes=[12, 9, 3], timeout=60.0)

    @torch.compile(backend="eager")
    def backward(features, labels):
        torch.nn.functional.cross_entropy(prepared(features), labels).backward()

    with loader:
        for features, labels in loader:
            optimizer.zero_grad()
            backward(features, labels)
            optimizer.step()
            iterations += 1
    return iterations
