"""The learning rate at which plain training does best, found in one process and never on the test set."""

from statistics import fmean

import torch
from torch.nn.functional import cross_entropy

from harness import learning

FOLDS = 5


def tuned(task, make, grid, *, batch, epochs, folds=FOLDS):
    """The rate of the best mean accuracy on held-out fifths of the training set, of as many updates as a run has.

    `make` gives the optimizer of parameters and `lr`; so many of the fifths are held out in turn.
    """
    torch.set_num_threads(1)
    accuracies = {rate: [_held_out(task, make, rate, fold, batch, epochs) for fold in range(folds)] for rate in grid}
    best = max(grid, key=lambda rate: fmean(accuracies[rate]))
    return {
        "rate": best,
        "at_the_edge_of_the_grid": best in (grid[0], grid[-1]),
        "accuracies_on_held_out": {f"{rate:g}": values for rate, values in accuracies.items()},
    }


def _held_out(task, make, rate, fold, batch, epochs):
    """Accuracy on one fifth of the training set of training on the rest."""
    inputs, truth = task.train
    held = torch.arange(len(truth)) % FOLDS == fold
    torch.manual_seed(1000 + fold)
    model = task.network()
    optimizer = make(model.parameters(), lr=rate)
    left = len(truth) * epochs // batch
    inputs_seen, truth_seen = inputs[~held], truth[~held]
    while left:
        for rows in torch.randperm(len(truth_seen)).split(batch)[: min(left, len(truth_seen) // batch)]:
            optimizer.zero_grad()
            cross_entropy(model(inputs_seen[rows]), truth_seen[rows]).backward()
            optimizer.step()
            left -= 1
    return learning.evaluate((inputs[held], truth[held]), list(model.parameters()))[1]
