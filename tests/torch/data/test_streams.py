"""Each worker draws from data of its own, as many samples as its size says: streams, and private datasets."""

import numpy as np
import pytest
from support import streams
from support.processes import results, run_workers
from support.told_speeds import told
from support.training import Run

pytestmark = pytest.mark.multiprocess

COUNTS = (61, 25, 38)


def of_one_process(run, values, counts=COUNTS):
    expected = streams.train_alone(run, counts, [value["seen"] for value in values])
    for value in values:
        np.testing.assert_allclose(value["weights"], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["tuples", "dicts", "map"])
@pytest.mark.parametrize("processes", [0, 2])
def test_each_step_is_the_one_of_a_single_process_on_the_union(kind, processes):
    run = Run(scripted=11, batch_size=4, epochs=2, num_workers=processes, options={"partition": "private"})
    values = results(run_workers(streams.train, 3, run, kind, COUNTS, {}))
    for count, value in zip(COUNTS, values, strict=True):
        for epoch in value["seen"]:
            assert sorted(number for batch in epoch for number in batch) == list(range(count))
        assert value["seen"][0] != value["seen"][1]
    of_one_process(run, values)
