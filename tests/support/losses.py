"""Losses as scripts write them, each with the loss over the union batch that it stands for."""

import warnings

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.nn.functional import cross_entropy, nll_loss, normalize
from torch.utils.data import DataLoader, TensorDataset

import evenstep
import evenstep.torch

WORKERS, SIZES, EPOCHS = 3, [12, 9, 3], 5
SHORT = {"samples": 9 * sum(SIZES) + 1}
"""The last slice is one sample: a worker has it, twice if it has a minimum, and the others copies of it."""
CROSS_ENTROPY = torch._C._nn.cross_entropy_loss
CLASS_WEIGHTS = torch.tensor([1.0, 0.2, 3.5], dtype=torch.float64)


def data():
    features = torch.randn(240, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return features, (features[:, 0] > 0).long() + (features[:, 1] > 0.5).long()


def model_of():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


def over_all(value):
    total = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(total)
    return total


def mean(scores, labels, loader):
    return cross_entropy(scores, labels)


def mean_beside_a_probe(scores, labels, loader):
    torch.autograd.grad(scores.sum(), scores, retain_graph=True)
    return cross_entropy(scores, labels)


def mean_of_a_sum(scores, labels, loader):
    return cross_entropy(scores, labels, reduction="sum") / len(labels)


def sum_with_the_weight_of_a_sum(scores, labels, loader):
    return cross_entropy(scores, labels, reduction="sum") / len(labels) * int(loader.current.sizes.sum()) / sum(SIZES)


def weighted_by_class(scores, labels, loader):
    loader.weigh_by(float(CLASS_WEIGHTS[labels].sum()))
    return cross_entropy(scores, labels, CLASS_WEIGHTS)


def weighted_by_class_over_len(scores, labels, loader):
    return cross_entropy(scores, labels, CLASS_WEIGHTS) * CLASS_WEIGHTS[labels].sum() / len(labels)


def weighted_by_class_alone(scores, labels, loader):
    return cross_entropy(scores, labels, CLASS_WEIGHTS, label_smoothing=0.1)


def some_ignored(scores, labels, loader):
    return nll_loss(scores.log_softmax(1), labels, ignore_index=1)


def raised(scores, labels, loader):
    assert torch._C._nn.cross_entropy_loss is not CROSS_ENTROPY
    raise evenstep.ConfigError("mine")


def divided_by_a_constant(scores, labels, loader):
    return cross_entropy(scores, labels, reduction="sum") / 8


def times_a_constant_of_equal_batches(scores, labels, loader):
    return cross_entropy(scores, labels) * len(labels) / 8


def divided_by_the_counts_of_all(scores, labels, loader):
    return cross_entropy(scores, labels, reduction="sum") / over_all(len(labels)) * WORKERS


def divided_by_the_own_samples_of_all(scores, labels, loader):
    own = loader.current.samples
    return cross_entropy(scores[:own], labels[:own], reduction="sum") / over_all(own) * WORKERS


def divided_by_the_class_weights_of_all(scores, labels, loader):
    total = over_all(CLASS_WEIGHTS[labels].sum())
    return cross_entropy(scores, labels, CLASS_WEIGHTS, reduction="sum") / total * WORKERS


def own_rows_against_all(scores, labels, loader):
    own = normalize(scores)
    start = int(loader.current.sizes[: dist.get_rank()].sum())
    return cross_entropy(5 * own @ evenstep.torch.all_gather(own).T, torch.arange(start, start + len(own)))


def all_rows_against_all(scores, labels, loader):
    return contrasted(evenstep.torch.all_gather(scores), labels)


def all_rows_by_weight(scores, labels, loader):
    return contrasted_by_weight(evenstep.torch.all_gather(scores), labels)


def two_views_of_all(scores, labels, loader):
    return evenstep.torch.all_gather(torch.cat([scores, scores.square()])).square().mean()


def gathered_in_other_shapes(scores, labels, loader):
    return evenstep.torch.all_gather(scores @ scores.T).square().mean()


def gathered_as_if_alike(scores, labels, loader):
    parts = [torch.zeros_like(scores) for _ in range(WORKERS)]
    dist.all_gather(parts, scores.detach())
    parts[dist.get_rank()] = scores
    return contrasted(torch.cat(parts), labels)


def gathered_as_if_alike_with_gradients(scores, labels, loader):
    return contrasted(torch.cat(torch.distributed.nn.functional.all_gather(scores)), labels)


def contrasted(scores, labels):
    rows = normalize(scores)
    return cross_entropy(5 * rows @ rows.T, torch.arange(len(rows)))


def contrasted_by_weight(scores, labels):
    rows = normalize(scores)
    weight = torch.linspace(1, 9, len(rows), dtype=torch.float64)
    return cross_entropy(5 * rows @ rows.T, torch.arange(len(rows)), weight)


def union(scores, labels):
    return cross_entropy(scores, labels)


def views(scores, labels):
    return torch.cat([scores, scores.square()]).square().mean()


def weighted_union(scores, labels):
    return cross_entropy(scores, labels, CLASS_WEIGHTS)


def weighted_union_over_len(scores, labels):
    return cross_entropy(scores, labels, CLASS_WEIGHTS, reduction="sum") / len(labels)


class WithLoss(torch.nn.Module):
    """A model that returns its loss alone."""

    def __init__(self, model, loss_of):
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self, features, labels):
        return {"loss": self.loss_of(self.model(features), labels, None)}


class WithScores(WithLoss):
    """A model that returns its loss, and the scores that it is of."""

    def forward(self, features, labels):
        scores = self.model(features)
        return {"loss": self.loss_of(scores, labels, None), "scores": scores}


EXACT = {
    "a mean": (mean, {}, union),
    "a mean within the model": (mean, {"within": WithLoss}, union),
    "a mean within the model, and scores": (mean, {"within": WithScores}, union),
    "a sum over len": (mean_of_a_sum, {}, union),
    "a mean beside a probe": (mean_beside_a_probe, {}, union),
    "a sum with its weight": (sum_with_the_weight_of_a_sum, {}, union),
    "class weights, and weigh_by": (weighted_by_class, {}, weighted_union),
    "class weights over len": (weighted_by_class_over_len, {}, weighted_union_over_len),
    "counts of all, and weights": (divided_by_the_counts_of_all, {"weights": "script"}, union),
    "counts of all without copies": (divided_by_the_own_samples_of_all, {"weights": "script", **SHORT}, union),
    "counts of all without doubles": (
        divided_by_the_own_samples_of_all,
        {"weights": "script", "batch_sizes": None, "scheme": "lb-bsp:minimum=2", **SHORT},
        union,
    ),
    "own rows against all": (own_rows_against_all, {}, contrasted),
    "all rows against all": (all_rows_against_all, {}, contrasted),
    "all rows by weight": (all_rows_by_weight, {}, contrasted_by_weight),
    "two views of all": (two_views_of_all, {}, views),
    "class weights of all, and weights": (divided_by_the_class_weights_of_all, {"weights": "script"}, weighted_union),
}
"""By name: the loss of a worker's batch, options of `prepare`, and the loss of the union batch."""
REFUSED = {
    "a constant": divided_by_a_constant,
    "a constant of equal batches": times_a_constant_of_equal_batches,
    "counts of all": divided_by_the_counts_of_all,
    "class weights of all": divided_by_the_class_weights_of_all,
}
WITHIN = {"a constant within the model": WithLoss, "a constant within the model, and scores": WithScores}

WEIGHED = {"class weights": weighted_by_class_alone, "ignored targets": some_ignored}
GATHERED = {"a gather": gathered_as_if_alike, "a gather with gradients": gathered_as_if_alike_with_gradients}
RAGGED = {"a gather in other shapes": gathered_in_other_shapes}


def together():
    """What each loss trained, or the sentence that refused it; and the warnings."""
    given = {name: (loss, options) for name, (loss, options, _) in EXACT.items()}
    return {
        name: trained(*each)
        for name, each in {
            **given,
            "an error of the script": (raised, {}),
            **{name: (of, {}) for name, of in (REFUSED | WEIGHED | GATHERED | RAGGED).items()},
            **{name: (divided_by_a_constant, {"within": kind}) for name, kind in WITHIN.items()},
        }.items()
    }


def trained(loss_of, options):
    options = {"batch_sizes": SIZES, **options}
    within, samples = options.pop("within", None), options.pop("samples", None)
    model = model_of() if within is None else within(model_of(), loss_of)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(*(each[:samples] for each in data())), batch_size=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared, optimizer, loader = evenstep.prepare(model, optimizer, loader, timeout=60.0, **options)
        with loader:
            try:
                for _ in range(EPOCHS):
                    for features, labels in loader:
                        optimizer.zero_grad()
                        if within is None:
                            loss_of(prepared(features), labels, loader).backward()
                        else:
                            prepared(features, labels)["loss"].backward()
                        optimizer.step()
                came_to = weights(model)
            except evenstep.ConfigError as error:
                came_to = str(error)
    assert torch._C._nn.cross_entropy_loss is CROSS_ENTROPY
    return came_to, [str(each.message) for each in caught]


def alone(union_loss, samples=None):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(EPOCHS):
        for features, labels in zip(*(each[:samples].split(sum(SIZES)) for each in data()), strict=True):
            optimizer.zero_grad()
            union_loss(model(features), labels).backward()
            optimizer.step()
    return weights(model)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def rows_beside(how):
    """The warnings where the model is given other rows than the prepared loader's."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = TensorDataset(*data())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared, optimizer, loader = evenstep.prepare(
            model, optimizer, DataLoader(dataset, batch_size=8), batch_sizes=SIZES, timeout=60.0
        )
        with loader:
            for _ in range(EPOCHS):
                for (features, labels), (others, _) in zip(loader, DataLoader(dataset, batch_size=8), strict=False):
                    rows = {"zip": others, "views": torch.cat([features, -features]).clone()}[how]
                    optimizer.zero_grad()
                    (cross_entropy(prepared(features), labels) + prepared(rows).square().mean()).backward()
                    optimizer.step()
    return [str(each.message) for each in caught]


def trained_on_sorted_data():
    """The sentence that refused a mean over data that are sorted by what they contribute, or None."""
    features, _ = data()
    targets = torch.linspace(2, 0, len(features), dtype=torch.float64).exp()[:, None]
    model = torch.nn.Linear(6, 1).double()
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    # Every list of the batch sampler has its largest targets first, by as much as a mean over 12 divides more than one
    # over 3. So gradients are as large on all workers, like those of a sum.
    lists = [list(range(start, len(features), 10)) for start in range(10)]
    loader = DataLoader(TensorDataset(features, targets), batch_sampler=lists)
    prepared, optimizer, loader = evenstep.prepare(model, optimizer, loader, batch_sizes=SIZES, timeout=60.0)
    with loader:
        try:
            for _ in range(EPOCHS):
                for inputs, wanted in loader:
                    optimizer.zero_grad()
                    torch.nn.functional.mse_loss(prepared(inputs), wanted).backward()
                    optimizer.step()
        except evenstep.ConfigError as error:
            return str(error)
    return None


def ended_in_order(order):
    """Two runs of a process that end in this order leave PyTorch its own collectives."""
    usual = dist.barrier
    loaders = []
    for _ in range(2):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)
        *_, prepared = evenstep.prepare(model, optimizer, loader, scheme="bsp")
        loaders.append(prepared)
    assert dist.barrier is not usual
    for run in order:
        loaders[run].close()
    assert dist.barrier is usual
