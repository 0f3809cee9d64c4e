"""Scripts for Lightning: each habit is the mathematics of one process of plain Lightning."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from support.processes import results, run_workers

pytest.importorskip("lightning", reason="needs Lightning: pip install 'evenstep[lightning]'")

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry
from support import lightning_checkpoints as checkpoints
from support import lightning_habits as habits
from support import lightning_scripts as scripts
from support import lightning_windows as windows

from evenstep.integrations.lightning import EvenstepFabricStrategy, EvenstepStrategy
from evenstep.telemetry import read_events
from evenstep.telemetry.events import IterationDone

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("lightning")]

EXACT = [*habits.EXACT, *scripts.EXACT, *windows.EXACT, checkpoints.whole]
REFUSED = {**checkpoints.MISTAKES, **windows.MISTAKES}
COMPARED = [*EXACT, *habits.ROUNDED]
ANYWHERE = [checkpoints.unknown_scheme, windows.communicate_in_whole_batches]
"""Mistakes that are not of Lightning scripts alone."""
BATCHES = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("lightning"))


@pytest.fixture(scope="module")
def found(folder):
    """What everything came to on each worker, from one start of the workers."""
    saving = [checkpoints.save, checkpoints.save_with_fabric]
    busy = [scripts.log_beside_a_busy_worker, scripts.accumulate_beside_a_busy_worker]
    every = [*COMPARED, *REFUSED, checkpoints.own_data, *checkpoints.MISTAKES, *scripts.MISTAKES, *saving, *busy]
    return results(run_workers(habits.come_to, habits.WORKERS, habits.Together, every, folder))


@pytest.fixture(scope="module")
def expected(folder):
    """What every habit came to in one process."""
    return results(run_workers(habits.come_to, 1, habits.Alone, COMPARED, folder))[0]


@pytest.fixture(scope="module")
def resumed(folder, found):
    """What two workers, on two nodes, came to from the checkpoints of three on one."""
    assert found[0]["save"] == found[0]["save_with_fabric"] == {}
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return results(run_workers(habits.come_to_on_nodes, 2, checkpoints.RESUMES, folder, environment=place))


@pytest.mark.parametrize("habit", EXACT, ids=lambda habit: habit.__name__)
def test_a_habit_is_the_mathematics_of_one_process(found, expected, habit):
    require_alike(found, expected, habit, 1e-10)


@pytest.mark.parametrize(("habit", "tolerance"), habits.ROUNDED.items(), ids=lambda part: getattr(part, "__name__", ""))
def test_a_habit_that_rounds_is_one_process_within_that(found, expected, habit, tolerance):
    require_alike(found, expected, habit, tolerance)


def require_alike(found, expected, habit, tolerance):
    name = habit.__name__
    for value in found:
        assert not isinstance(value[name], str), value[name]
        for part in expected[name].keys() - {"seen"}:
            np.testing.assert_allclose(value[name][part], expected[name][part], rtol=0, atol=tolerance, err_msg=part)


@pytest.mark.parametrize("habit", ["automatic", "with_fabric"])
def test_each_sample_is_trained_on_once_an_epoch_in_batches_of_changing_sizes(found, expected, habit):
    seen = [value[habit]["seen"] for value in found]
    slices = expected[habit]["seen"]
    assert [sorted(chain(*parts)) for parts in zip(*seen, strict=True)] == [sorted(each) for each in slices]
    assert sorted(chain(*slices[:BATCHES])) == list(range(habits.RUN.samples))
    assert len({tuple(map(len, parts)) for parts in zip(*seen, strict=True)}) > 3


@pytest.mark.parametrize("kind", ["tuples", "map"])
def test_data_of_each_workers_own_are_the_mathematics_of_one_process(found, kind):
    first, *resumed = ([value["own_data"][kind, name] for value in found] for name in (None, "step=4", "after"))
    epoch = [value["seen"] for value in first]
    for values, before in zip(resumed, (4, None), strict=True):
        batches = [[*own[:before], *value["seen"]] for own, value in zip(epoch, values, strict=True)]
        for count, own in zip(checkpoints.COUNTS, batches, strict=True):
            assert sorted(chain(*own)) == sorted([*range(count)] * 2)
        (expected,) = results(run_workers(checkpoints.own_data_alone, 1, batches))
        for value in values:
            np.testing.assert_allclose(value["weights"], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("habit", "run"), [("log_beside_a_busy_worker", "busy"), ("accumulate_beside_a_busy_worker", "accumulating")]
)
def test_waiting_for_others_within_a_step_is_no_compute(folder, found, habit, run):
    assert [value[habit] for value in found] == [{}] * habits.WORKERS
    seconds = {worker: [] for worker in range(habits.WORKERS)}
    for event in read_events(Path(folder, run), kind=IterationDone):
        seconds[event.worker].append(event.compute_seconds)
    assert min(seconds[0]) < min(seconds[1]) / 2


@pytest.mark.parametrize(("mistake", "sentence"), REFUSED.items(), ids=lambda part: getattr(part, "__name__", ""))
def test_what_cannot_work_is_refused_on_every_worker(found, mistake, sentence):
    for value in found:
        said = value[mistake.__name__]
        assert said.startswith("ConfigError: ")
        assert sentence in said
        assert "(docs/integrations/lightning.md)" in said or mistake in ANYWHERE


@pytest.mark.parametrize(
    ("mistake", "sentence"), scripts.MISTAKES.items(), ids=lambda part: getattr(part, "__name__", "")
)
def test_what_lightning_refuses_for_several_workers_is_refused(found, mistake, sentence):
    for value in found:
        assert sentence in value[mistake.__name__]


@pytest.mark.parametrize("name", checkpoints.SAVED)
def test_another_number_of_workers_on_two_nodes_continues_from_lightnings_checkpoint(expected, resumed, name):
    whole = expected["whole"]
    for value in resumed:
        assert not isinstance(value["resume"], str), value["resume"]
        np.testing.assert_allclose(value["resume"][name]["weights"], whole[name.partition("/")[0]], rtol=0, atol=1e-10)
    seen = [value["resume"][name]["seen"] for value in resumed]
    left = whole["seen"][checkpoints.SAVED[name] :]
    assert [sorted(chain(*parts)) for parts in zip(*seen, strict=True)] == [sorted(each) for each in left]


def test_a_checkpoint_of_another_strategy_within_an_epoch_is_refused(resumed):
    for value in resumed:
        assert "saved in the middle of an epoch by another strategy" in value["resume_another_strategys"]


def test_another_number_of_workers_on_two_nodes_continues_from_fabrics_checkpoint(expected, resumed):
    for value in resumed:
        assert not isinstance(value["resume_with_fabric"], str), value["resume_with_fabric"]
        np.testing.assert_allclose(
            value["resume_with_fabric"]["weights"], expected["whole"]["module"], rtol=0, atol=1e-10
        )


def test_both_are_registered_by_name():
    assert type(StrategyRegistry.get("evenstep")) is EvenstepStrategy
    assert type(STRATEGY_REGISTRY.get("evenstep")) is EvenstepFabricStrategy
