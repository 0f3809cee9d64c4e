"""Training with torch.compile, and a backend that counts what is compiled; it compiles nothing, which takes no time."""

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from support import training
from support.training import FEATURES, step, weights


class Net(torch.nn.Module):
    """One of the user's own: PyTorch does not look into a Sequential that is compiled in place."""

    def __init__(self, run):
        super().__init__()
        self.layers = training.model_of(run)

    def forward(self, inputs):
        return self.layers(inputs)


def train(run, how):
    """The weights, how many graphs were compiled, and the sizes that were computed on; `how` the model is compiled."""
    torch._dynamo.reset()
    graphs = []

    def counting(graph, _):
        graphs.append(graph)
        return graph.forward

    model = Net(run)
    options = {"backend": counting, **({"dynamic": False} if how == "for one shape" else {})}
    if how == "in place":
        model.compile(**options)
    elif how in ("before prepare", "for one shape"):
        model = torch.compile(model, **options)
    loader = DataLoader(TensorDataset(*training.data(run)), batch_size=run.batch_size, shuffle=True)
    model, optimizer, loader = evenstep.prepare(
        model, training.optimizer_of(run, model), loader, scheme=run.chosen_scheme(), seed=run.seed, timeout=30.0
    )
    if how == "after prepare":
        model = torch.compile(model, **options)
    with loader:
        sizes = set()
        for _ in range(run.epochs):
            for inputs, targets in loader:
                step(model, optimizer, inputs, targets)
                sizes.add(len(inputs))
        with torch.no_grad():
            finite = bool(mse_loss(model(torch.ones(1, FEATURES, dtype=run.dtype)), torch.zeros(1, 1)).isfinite())
        return {"weights": weights(model), "graphs": len(graphs), "sizes": sorted(sizes), "finite": finite}


def train_each(run, ways):
    return {how: train(run, how) for how in ways}
