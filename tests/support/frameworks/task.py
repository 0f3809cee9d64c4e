"""The task: a small network on generated data in the order of the data, from weights that are written down in NumPy."""

from dataclasses import dataclass

import numpy as np

from evenstep.schemes import Scheme

WORKERS, LENGTH, GLOBAL, EPOCHS = 3, 250, 24, 3
RATE, MOMENTUM = 0.0625, 0.875  # Keras takes them as float32, in which these are exact.
INPUTS, HIDDEN, KINDS = 16, 32, 4
SLICES = [np.arange(at, min(at + GLOBAL, LENGTH)) for at in range(0, LENGTH, GLOBAL)]
"""Of an epoch: the indices whose batches are the union in each iteration, whatever the sizes are."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run.

    `killed`: the iteration before which the last worker is killed. `servers`: addresses and secret of some to train on.
    `kind`: a model of `kinds` instead of the small network. `odd`: in what worker 1 has another. `faulty`: worker 1
    has a loss that is not finite in one iteration.
    """

    scheme: Scheme | str
    dtype: str = "float32"
    killed: int | None = None
    servers: tuple | None = None
    kind: str | None = None
    odd: str | None = None
    faulty: bool = False


def data(dtype):
    """Inputs, [LENGTH, INPUTS], and labels, int32 of shape [LENGTH]."""
    generator = np.random.default_rng(3)
    inputs = generator.normal(size=(LENGTH, INPUTS))
    labels = (inputs @ generator.normal(size=(INPUTS, KINDS))).argmax(1)
    return inputs.astype(dtype), labels.astype(np.int32)


def averaged(taken, period):
    """The weights, in NumPy and float64, of workers that step alone and average after each `period` of an epoch.

    Args:
        taken: The indices of each iteration, a list of them for each worker.
        period: The iterations between two averages.
    """
    inputs, labels = data("float64")
    start, counts = first_weights("float64"), [0] * len(taken)
    workers = [(start, [np.zeros_like(each) for each in start]) for _ in taken]
    for iteration, parts in enumerate(zip(*taken, strict=True)):
        for worker, at in enumerate(parts):
            workers[worker] = _stepped(*workers[worker], inputs[at], labels[at])
            counts[worker] += len(at)
        number = iteration % len(SLICES) + 1
        if number % period == 0 or number == len(SLICES):
            shares = [count / sum(counts) for count in counts]
            weights, memory = (
                [np.tensordot(shares, same, 1) for same in zip(*kind, strict=True)]
                for kind in zip(*workers, strict=True)
            )
            workers, counts = [(weights, memory)] * len(workers), [0] * len(workers)
    return workers[0][0]


def _stepped(weights, memory, inputs, labels):
    hidden = np.tanh(inputs @ weights[0] + weights[1])
    wrong = np.exp(hidden @ weights[2] + weights[3])
    wrong /= wrong.sum(1, keepdims=True)
    wrong[np.arange(len(labels)), labels] -= 1
    wrong /= len(labels)
    inner = wrong @ weights[2].T * (1 - hidden**2)
    gradients = [inputs.T @ inner, inner.sum(0), hidden.T @ wrong, wrong.sum(0)]
    memory = [MOMENTUM * old + new for old, new in zip(memory, gradients, strict=True)]
    return [each - RATE * change for each, change in zip(weights, memory, strict=True)], memory


def loss_of(weights):
    """The mean loss on all samples."""
    inputs, labels = data("float64")
    logits = np.tanh(inputs @ weights[0] + weights[1]) @ weights[2] + weights[3]
    return float((np.log(np.exp(logits).sum(1)) - logits[np.arange(LENGTH), labels]).mean())


def first_weights(dtype):
    """Of `tanh(inputs @ w0 + b0) @ w1 + b1`: w0, b0, w1, b1."""
    generator = np.random.default_rng(4)
    shapes = [(INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, KINDS), (KINDS,)]
    return [(generator.normal(size=shape) * 0.2).astype(dtype) for shape in shapes]
