"""Sizes that change do not make torch.compile compile without end."""

import numpy as np
import pytest
from support import compiling, training
from support.processes import results, run_workers
from support.training import Run

# How the model is compiled, and the graphs of its forward pass: one for all sizes, if it is known to be compiled. Else
# the compiler begins with the first size alone, and takes one sample for a shape of its own.
WAYS = {"before prepare": 1, "in place": 1, "for one shape": 1, "after prepare": 3}


@pytest.mark.multiprocess
def test_graphs_are_counted_and_the_mathematics_is_that_of_one_process():
    run = Run(samples=120, epochs=2, scripted=11, batch_size=10)
    values = results(run_workers(compiling.train_each, 2, run, list(WAYS)))
    expected = training.train_alone(run, 20)
    for value in values:
        for how, most in WAYS.items():
            found = value[how]
            assert len(found["sizes"]) > 6
            assert found["sizes"][0] >= (1 if how == "after prepare" else 2)
            # The evaluation of one sample, without gradients, is a graph of its own.
            assert 1 <= found["graphs"] <= most + 1
            assert found["finite"]
            np.testing.assert_allclose(found["weights"], expected, rtol=0, atol=1e-10)
