"""The task: a small network on generated data in the order of the data, from weights that are written down in NumPy."""

from dataclasses import dataclass

import numpy as np

from evenstep.schemes import Scheme

WORKERS, LENGTH, GLOBAL, EPOCHS = 3, 250, 24, 3
RATE, MOMENTUM = 0.05, 0.9
INPUTS, HIDDEN, KINDS = 16, 32, 4
SLICES = [np.arange(at, min(at + GLOBAL, LENGTH)) for at in range(0, LENGTH, GLOBAL)]
"""Of an epoch: the indices whose batches are the union in each iteration, whatever the sizes are."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run. `killed`: the iteration before which the last worker is killed."""

    scheme: Scheme | str
    dtype: str = "float32"
    killed: int | None = None


def data(dtype):
    """Inputs, [LENGTH, INPUTS], and labels, int32 of shape [LENGTH]."""
    generator = np.random.default_rng(3)
    inputs = generator.normal(size=(LENGTH, INPUTS))
    labels = (inputs @ generator.normal(size=(INPUTS, KINDS))).argmax(1)
    return inputs.astype(dtype), labels.astype(np.int32)


def first_weights(dtype):
    """Of `tanh(inputs @ w0 + b0) @ w1 + b1`: w0, b0, w1, b1."""
    generator = np.random.default_rng(4)
    shapes = [(INPUTS, HIDDEN), (HIDDEN,), (HIDDEN, KINDS), (KINDS,)]
    return [(generator.normal(size=shape) * 0.2).astype(dtype) for shape in shapes]
