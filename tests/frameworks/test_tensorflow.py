"""TensorFlow and Keras: real workers train as one process does, and each is given samples by its speed."""

import numpy as np
import pytest
from support import of_tensorflow

from evenstep.schemes import Scheme, static
from evenstep.telemetry import read_events
from evenstep.telemetry.events import IterationDone, Noted
from evenstep.testing.scripted import Scripted

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("tensorflow")]

CHANGING = Scheme(name="scripted", load=Scripted(seed=11))
LOOPS = {"bsp": "bsp", "lb-bsp": "lb-bsp", "dbs": "dbs", "changing": CHANGING, "by hand": static([20, 4])}
LENGTH, GLOBAL, EPOCHS = 150, 24, 3
ITERATIONS = 7


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every job came to on each worker, from one start of the workers."""
    folder = tmp_path_factory.mktemp("tensorflow")
    jobs = {name: ("loop", {"scheme": scheme}) for name, scheme in LOOPS.items()}
    jobs["float64"] = "loop", {"scheme": CHANGING, "kind": "float64"}
    jobs["resumed"] = "loop", {"scheme": CHANGING, "kind": "float64", "stop_after": 10}
    jobs["recorded"] = "loop", {"scheme": "lb-bsp", "run_dir": str(folder / "run")}
    jobs["fit"] = "fit", {"scheme": CHANGING}
    jobs["fit eagerly"] = "fit", {"scheme": CHANGING, "run_eagerly": True}
    jobs["odd"] = "odd", {"scheme": CHANGING}
    (folder / "written").mkdir()
    jobs["written"] = "written", {"folder": str(folder / "written")}
    jobs["validated by the first"] = "validated_by_first", {}
    for ignored in (False, True):
        jobs |= {
            f"masked {ignored}{'alone' * alone}": ("masked", {"ignored": ignored, "alone": alone}) for alone in (0, 1)
        }
    for padded in (False, True):
        jobs[f"ahead {padded}"] = "ahead", {"scheme": "bsp", "padded": padded, "waits": True}
        jobs[f"changing {padded}"] = "ahead", {"scheme": CHANGING, "padded": padded, "waits": False}
    jobs["sharded"] = "sharded", {}
    jobs["as if alike"] = "sharded", {"partition": "common"}
    jobs["table"] = "table", {}
    jobs["refused"] = "refused", {}
    jobs["own loss"] = "follow_own_loss", {}
    jobs |= {"alone": ("alone", {}), "alone float64": ("alone", {"kind": "float64"}), "odd alone": ("odd", {})}
    return [*of_tensorflow.do(folder, jobs), folder]


def close(first, second, within):
    return all(np.abs(one - other).max() <= within for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("name", LOOPS)
def test_workers_reach_the_weights_of_one_process_with_one_trace(found, name):
    alone = found[0]["alone"]
    for worker in found[:2]:
        assert close(worker[name]["weights"], alone["weights"], 1e-6)
        assert worker[name]["traces"] == 1
        assert worker[name]["steps"] == alone["steps"] == EPOCHS * ITERATIONS


@pytest.mark.parametrize("name", ["float64", "resumed"])
def test_in_float64_the_weights_are_those_of_one_process_also_after_a_stop(found, name):
    for worker in found[:2]:
        assert close(worker[name]["weights"], found[0]["alone float64"]["weights"], 1e-12)


@pytest.mark.parametrize("name", ["changing", "resumed", "lb-bsp"])
def test_each_sample_is_taken_once_in_each_epoch(found, name):
    for epoch in range(EPOCHS):
        taken = [
            index for worker in found[:2] for at, indices in worker[name]["taken"] if at == epoch for index in indices
        ]
        assert sorted(taken) == list(range(LENGTH))


@pytest.mark.parametrize("name", ["fit", "fit eagerly"])
def test_the_fit_of_keras_reaches_the_weights_of_one_process(found, name):
    for worker in found[:2]:
        assert close(worker[name]["weights"], found[0]["alone"]["weights"], 1e-6)
        assert worker[name]["next"] == EPOCHS


def test_callbacks_get_the_same_metrics_of_an_epoch_on_every_worker(found):
    """Otherwise ReduceLROnPlateau gives the workers different learning rates, and weights drift apart."""
    first, second = (worker["fit"] for worker in found[:2])
    assert first["own"]["loss"] != second["own"]["loss"]
    assert first["history"] == second["history"]
    low, high = sorted([first["own"]["loss"], second["own"]["loss"]])
    assert low < first["history"]["loss"][-1] < high


def test_where_one_worker_validates_the_others_know_its_metrics(found):
    """Otherwise a callback lowers the rate of that worker alone, and weights drift apart."""
    first, second = (worker["validated by the first"] for worker in found[:2])
    assert first["history"] == second["history"]
    assert first["history"]["val_loss"][-1] == pytest.approx(first["true"], rel=1e-5)
    assert first["rate"] == second["rate"] < 0.05
    assert close(first["weights"], second["weights"], 0.0)


def test_a_table_that_has_a_shape_is_asked_for_batches(found):
    assert all(worker["table"] == [6, 2] for worker in found[:2])


def test_one_worker_writes_the_files_that_callbacks_of_all_write(found):
    files = sorted(each.name for each in (found[-1] / "written").iterdir())
    assert files == ["all.weights.h5", "log.csv", "own 0.weights.h5", "own 1.weights.h5"]
    assert len((found[-1] / "written" / "log.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize("ignored", [False, True])
def test_a_fit_with_a_mask_behind_a_map_reaches_the_weights_of_one_process(found, ignored):
    for worker in found[:2]:
        assert close(worker[f"masked {ignored}"]["weights"], found[0][f"masked {ignored}alone"]["weights"], 1e-6)
        # Callbacks get the same metrics of an epoch, whatever the dataset is wrapped in.
        assert worker[f"masked {ignored}"]["history"] == found[0][f"masked {ignored}"]["history"]


def test_shards_of_the_same_length_are_no_common_data(found):
    for worker in found[:2]:
        assert worker["sharded"].startswith(
            "DisagreementError: worker 1 has other samples than worker 0, in a dataset of the same length: give all"
        )
        assert worker["as if alike"] is None


@pytest.mark.parametrize("padded", [False, True])
def test_the_next_batch_is_fetched_while_this_one_is_computed_on_and_is_that_of_its_indices(found, padded):
    for worker in found[:2]:
        assert worker[f"ahead {padded}"] is worker[f"changing {padded}"] is None


def test_what_fetches_ahead_is_refused_in_one_sentence(tmp_path):
    # One worker: of several, one may have stepped once by then, and they would be out of step in the next job.
    jobs = {"fit ahead": ("fit", {"scheme": "bsp", "prefetched": True})}
    [worker] = of_tensorflow.do(tmp_path, jobs, workers=1)
    assert "ConfigError: a batch was asked for before the step on the last one: let the" in worker["fit ahead"]
    assert "leave out prefetch(), shuffle(), cache() and unbatch()" in worker["fit ahead"]


def test_gradients_that_are_sparse_missing_and_of_two_dtypes(found):
    for worker in found[:2]:
        assert close(worker["odd"]["weights"], found[0]["odd alone"]["weights"], 1e-6)


def test_the_event_log_has_every_iteration_and_the_notes(found):
    events = list(read_events(found[2] / "run", kind=IterationDone))
    assert len(events) == 2 * EPOCHS * ITERATIONS
    assert sum(1 for _ in read_events(found[2] / "run", kind=Noted)) == 2 * EPOCHS * ITERATIONS


def test_workers_import_no_torch(found):
    assert not found[0]["torch"]


def test_workers_whose_weights_part_are_named(found):
    for worker in found[:2]:
        assert "DisagreementError: worker 1 has other weights in" in worker["own loss"]


REFUSED = {
    "a dataset": "ConfigError: a tf.data.Dataset cannot be asked for samples by their indices: give arrays, as in",
    "unequal": "ConfigError: the arrays of data must have equally many rows, one for each sample, but they",
    "no index": "ConfigError: data must be arrays with a row for each sample, which can be indexed, not map",
    "numbers": "ConfigError: data must be arrays with a row for each sample, which can be indexed, not 1",
    "parameter servers": "ConfigError: TF_CONFIG lists worker, ps: list workers only, which sum their",
    "another task": "ConfigError: TF_CONFIG must list the address of this task, evaluator 0, such as host:port in",
    "no such worker": "ConfigError: TF_CONFIG must list the address of this task, worker 2, such as host:port in",
    "a scope": "ConfigError: the model is in the scope of a MirroredStrategy, which shares out batches differently",
    "not built": "ConfigError: the model has no weights yet: begin it with a keras.Input, or call it once",
    "servers": "ConfigError: the scheme 'ssp' trains on parameter servers: use evenstep.Client",
    "again": "ConfigError: the optimizer was prepared already: prepare each optimizer once",
    "strides": "ConfigError: steps_per_execution=3 asks for batches ahead of their steps, and the size of a batch",
    "sum": "ConfigError: the loss has reduction='sum', and evenstep weights means over batches: leave reduction out",
    "no reduction": "ConfigError: the loss has reduction=None, and evenstep weights means over batches",
    "a second optimizer": "ConfigError: the optimizer SGD was not prepared and steps in the loop over the prepared",
    "classes": "ConfigError: with class_weight Keras fetches batches ahead of their steps: give the weight of each",
    "validation": "ConfigError: the prepared dataset is for training: give validation_data other data",
    "rows": "ConfigError: the data returned an array of shape [2, 8] for 3 indices: let its __getitem__ take an array",
    "lists": "ConfigError: data must be arrays with a row for each sample, which can be indexed, not",
    "private": "ConfigError: partition must be 'common' or None, not 'private': data that stay with their workers",
    "another optimizer": "ConfigError: the model was compiled with another optimizer than the prepared one, which sums",
    "several masks": "ConfigError: with a mask the losses of several outputs are means over different counts, and a",
    "scaled": "ConfigError: under mixed_float16 Keras would look for overflows in the gradients of each worker alone",
    "scaled before": "ConfigError: compile has wrapped the optimizer in a LossScaleOptimizer, which looks for",
    "xla": "ConfigError: jit_compile=True would compile the step again for each size of a batch",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_in_one_sentence(found, name):
    for worker in found[:2]:
        assert REFUSED[name] in worker["refused"][name]
