"""The table of frameworks: a row, and an adapter beside this file, is all that another one needs."""

from dataclasses import dataclass
from importlib.util import find_spec

import pytest


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A row: the modules that must be there, and how closely workers agree with one process in each dtype.

    The module `of_NAME` beside this file is the adapter. It has `join(rank, addresses)`, where each worker has a
    free `host:port` of its own; `train(job)`, an iterator that trains this worker's part and gives `(indices, sizes)`
    after each iteration, and last the weights as NumPy arrays; and `alone(job)`, the weights that the framework alone
    reaches in one process on the batches `SLICES`. With `served` it also has `gradients(job)`, a function from weights,
    inputs and labels to the gradients of the mean loss, as the framework's own arrays.
    """

    needs: tuple[str, ...]
    within: dict[str, float]
    served: bool = True


FRAMEWORKS = {
    "torch": Framework(needs=("torch",), within={"float32": 1e-6, "float64": 1e-12}, served=False),
    "jax": Framework(needs=("jax", "optax"), within={"float32": 1e-6, "float64": 1e-12}),
    "tensorflow": Framework(needs=("tensorflow",), within={"float32": 1e-6, "float64": 1e-12}),
    "mxnet": Framework(needs=("mxnet",), within={"float32": 1e-6}),  # Its optimizers divide in float32.
}


def is_installed(module):
    spec = find_spec(module)
    return spec is not None and spec.origin is not None  # A folder of tests of that name has no origin.


def require(name):
    """Skip a test of a framework that is not installed here."""
    for module in FRAMEWORKS[name].needs:
        if not is_installed(module):
            pytest.skip(f"needs {module}: make test-all runs this where it is installed", allow_module_level=True)
