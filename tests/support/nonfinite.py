"""A loop in which one worker's batch holds a NaN once, under each way in which gradients are summed or averaged."""

import warnings

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.core.load.static import Static
from evenstep.schemes import Scheme
from support.losses import data, model_of, weights

WORKERS, SIZES, BAD_ITERATION, BAD_WORKER = 3, (12, 9, 3), 3, 1


def model_with_norm():
    torch.manual_seed(1)
    parts = [torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 3)]
    return torch.nn.Sequential(*parts).double()


def with_sizes(**parts):
    return Scheme(load=Static(sizes=SIZES), **parts)


KINDS = {
    "summed": (model_of, with_sizes(nonfinite="skip")),
    "weighed by units": (model_of, with_sizes(nonfinite="skip")),
    "accumulated": (model_of, "lb-bsp:micro_batch=3"),
    "with norms": (model_with_norm, with_sizes(nonfinite="skip")),
    "probed": (model_of, with_sizes(nonfinite="skip")),
    "averaged": (model_of, with_sizes(nonfinite="skip", period=1)),
    "refused": (model_of, with_sizes(nonfinite="refuse")),
    "spread": (model_of, with_sizes(nonfinite="spread")),
    "everywhere": (model_of, with_sizes(nonfinite="skip", period=1)),
}


def together(kind):
    """Weights and buffers, or the sentence that ended this worker; positions left out, how often, and the warnings."""
    make, scheme = KINDS[kind]
    model, left_out = make(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(*data(), torch.arange(len(data()[0])))
    loader = DataLoader(samples, batch_size=sum(SIZES) // WORKERS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared, optimizer, loader = evenstep.prepare(model, optimizer, loader, scheme=scheme, timeout=20.0)
        with loader:
            try:
                for features, labels, positions in loader:
                    bad = positions[0] // sum(SIZES) == BAD_ITERATION
                    if bad and (kind == "everywhere" or dist.get_rank() == BAD_WORKER):
                        if not left_out:
                            features = features.clone().fill_(torch.nan)
                        left_out += positions.tolist()
                    scores = prepared(features)
                    if kind == "weighed by units":
                        loader.weigh_by(2.5 * len(labels))
                    if kind == "probed":
                        torch.autograd.grad(scores.sum() * torch.nan, scores, retain_graph=True)
                    optimizer.zero_grad()
                    cross_entropy(scores, labels).backward()
                    optimizer.step()
                came_to = weights(model), [each.tolist() for each in model.buffers()]
            except (evenstep.EvenstepError, FloatingPointError) as error:
                came_to = str(error)
            skipped = loader.statistics().skipped
    return came_to, left_out, skipped, [str(each.message) for each in caught]


def alone(left_out):
    """The weights of one process for which these samples have no loss."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    counted = torch.ones(len(data()[0]))
    counted[left_out] = 0
    for features, labels, counts in zip(*(each.split(sum(SIZES)) for each in (*data(), counted)), strict=True):
        optimizer.zero_grad()
        (cross_entropy(model(features), labels, reduction="none") * counts).sum().div(len(labels)).backward()
        optimizer.step()
    return weights(model)
