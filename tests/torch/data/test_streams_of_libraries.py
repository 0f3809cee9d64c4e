"""Streams of webdataset and of Hugging Face datasets: each worker reads shards of its own."""

import numpy as np
import pytest
from support import streams
from support.processes import results, run_workers
from support.training import Run

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("kind", ["webdataset", "datasets"])
@pytest.mark.parametrize("processes", [0, 2])
def test_each_sample_once_and_each_step_of_the_union(kind, processes, tmp_path):
    pytest.importorskip(kind)
    if kind == "webdataset":
        streams.write_shards(tmp_path)
    options = {"global_batch_size": 12}
    run = Run(scripted=5, batch_size=4, epochs=2, num_workers=processes, options=options)
    values = results(run_workers(streams.train_on_shards, 3, run, kind, str(tmp_path)))
    for epoch in range(run.epochs):
        numbers = [number for value in values for batch in value["seen"][epoch] for number in batch]
        assert sorted(numbers) == list(range(streams.LENGTH))
    whole = [
        [np.concatenate(batches).astype(int).tolist() for batches in zip(*epochs, strict=True)]
        for epochs in zip(*[value["seen"] for value in values], strict=True)
    ]
    expected = streams.train_alone(run, [streams.LENGTH], [whole])
    for value in values:
        np.testing.assert_allclose(value["weights"], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_stateful_loader_over_a_stream_is_read_again_and_over_a_dataset_refused(processes):
    pytest.importorskip("torchdata")
    run, counts, stop = Run(scheme="bsp", batch_size=4, epochs=2, num_workers=processes), (31, 12), 3
    whole = results(run_workers(streams.train, 2, run, "stateful", counts, {"stop": stop}))
    resumed = results(run_workers(streams.train, 2, run, "stateful", counts, {"state": whole[1]["state"]}))
    for before, after in zip(whole, resumed, strict=True):
        assert after["seen"] == [before["seen"][0][stop:], before["seen"][1]]
        np.testing.assert_allclose(after["weights"], before["weights"], rtol=0, atol=1e-12)
    for run.options in ({"partition": "private"}, {"accumulation": 2}):
        for outcome in run_workers(streams.train, 2, run, "stateful map", counts, {}):
            assert outcome.error.startswith("ConfigError: the loader StatefulDataLoader has its own __iter__")
