"""Workers of several processes: the same mathematics as one process, with models that are split over a device mesh."""

import signal

import numpy as np
import pytest
from support import habits, meshes, sharded, training
from support.meshes import DDP, FSDP, HSDP, HSDP_TP
from support.processes import results, run_workers
from support.training import Run

import evenstep

pytestmark = pytest.mark.multiprocess

UNEVEN = {"samples": 82, "epochs": 3}
FIRST = int(training.epoch_order(Run(**UNEVEN), 0)[0])
"""The sample that the first replica begins with."""


@pytest.mark.parametrize(("names", "processes", "workers"), [(DDP, 4, 2), (HSDP, 4, 4), (HSDP_TP, 8, 4)])
def test_changing_sizes_follow_the_trajectory_of_one_process(names, processes, workers):
    run = Run(scripted=11, **UNEVEN)
    values = results(run_workers(meshes.train, processes, run, names))
    assert {len(sizes) for sizes in values[0]["sizes"]} == {workers}
    assert len({tuple(sizes) for sizes in values[0]["sizes"]}) > 6
    expected = sharded.train_clipped_alone(run, 5 * workers, meshes.CLIP[names])
    for value in values:
        np.testing.assert_allclose(value["weights"], expected, rtol=0, atol=1e-10)
    peers = processes // workers
    for rank in range(0, processes, peers):  # Peers have the same batches.
        assert all(peer["sums"] == values[rank]["sums"] for peer in values[rank : rank + peers])
    assert values[0]["sums"] != values[peers]["sums"]


def test_habits_of_scripts_are_the_mathematics_of_one_process():
    run = Run(samples=77, epochs=2, scripted=11)
    found = results(run_workers(meshes.train_by_habits, 4, run, FSDP))
    for habit in meshes.HABITS:
        values = [value[habit.__name__] for value in found]
        assert not [value for value in values if isinstance(value, str)]
        for value in values:
            np.testing.assert_allclose(value, habits.alone(habit, run), rtol=0, atol=1e-10, err_msg=habit.__name__)


@pytest.mark.parametrize("sequence", [True, False])
def test_a_language_model_whose_blocks_are_split(sequence):
    run = Run(scripted=11, samples=82, num_workers=0 if sequence else 2, epochs=2 if sequence else 1)
    for value in results(run_workers(meshes.train_language_model, 4, run, HSDP_TP, sequence)):
        np.testing.assert_allclose(value, meshes.train_language_model_alone(run, 10), rtol=0, atol=1e-10)


def test_peers_that_have_a_part_of_each_sample():
    run = Run(scripted=11, **UNEVEN)
    values = results(run_workers(meshes.train_on_parts, 4, run))
    assert len({tuple(sizes) for sizes in values[0]["sizes"]}) > 6
    for value in values:
        np.testing.assert_allclose(value["weights"], meshes.train_on_parts_alone(run, 10), rtol=0, atol=1e-10)


def test_pipelines_whose_numbers_of_micro_batches_always_change():
    run = Run(scripted=11, samples=160)
    values = results(run_workers(meshes.train_pipelines, 4, run, 40, 2))
    assert len(set(values[0]["sizes"])) > 6
    for first, last in (values[:2], values[2:]):
        weights = first["weights"] + last["weights"]
        np.testing.assert_allclose(weights, training.train_alone(run, 40), rtol=0, atol=1e-10)


def test_outputs_that_are_split_over_peers():
    run = Run(scheme=evenstep.schemes.static([7, 3]), samples=250)  # Long enough for a look at the loss.
    assert results(run_workers(meshes.train_with_split_outputs, 4, run)) == [25] * 4


@pytest.mark.parametrize(("names", "slow"), [(DDP, 3), (HSDP, 1)])
def test_a_worker_is_as_fast_as_its_slowest_peer(names, slow):
    """One process alone is slow. Under HSDP the workers whose shards wait for it get as little as it does."""
    run = Run(samples=640, batch_size=16, scheme="lb-bsp", epochs=1)
    first, *others = results(run_workers(meshes.train_beside_a_busy_peer, 4, run, names, slow))
    assert others == [first] * 3
    groups = np.reshape(first, (2, -1))
    assert np.ptp(groups, axis=1).max() <= 1
    own = groups[slow // 2].max()
    assert own < groups[1 - slow // 2].min() / 2, first


def test_a_peer_that_dies_is_named_with_its_replica():
    outcomes = run_workers(meshes.die, 4, Run(**UNEVEN), DDP, 3, 2, "SIGKILL")
    assert outcomes[3].exitcode == -signal.SIGKILL
    for outcome in outcomes[:3]:
        assert "rank 3 (replica 1) ended, died, stopped or did not answer" in outcome.error, outcome.error


def test_a_peer_that_is_stopped_is_named_though_the_others_wait_in_groups_of_the_script():
    for outcome in run_workers(meshes.die, 4, Run(**UNEVEN), FSDP, 2, 2, "SIGSTOP", stopped=[2])[:2]:
        assert "rank 2 (replica 1) stood still for" in outcome.error, outcome.error


@pytest.mark.parametrize(("sample", "said"), [(0, "has other samples"), (FIRST, "got another batch")])
def test_a_peer_with_another_sample_is_named_with_its_replica(sample, said):
    for outcome in run_workers(meshes.train_on_another_sample, 4, Run(**UNEVEN), DDP, 1, sample):
        assert f"rank 1 (replica 0) {said} than rank 0 (replica 0)" in outcome.error, outcome.error


def test_a_peer_that_does_something_else_is_named_with_its_replica():
    for outcome in run_workers(meshes.step_more_often, 4, Run(**UNEVEN), FSDP, 3, 2):
        assert "rank 3 (replica 1) has 3 optimizer steps where the others have 2" in outcome.error


def test_a_checkpoint_goes_on(tmp_path):
    run = Run(scripted=3, optimizer="adam", **UNEVEN)
    results(run_workers(meshes.train_saving, 4, run, FSDP, tmp_path, 8))
    for value in results(run_workers(meshes.train_restored, 4, run, FSDP, tmp_path)):
        np.testing.assert_allclose(value["weights"], training.train_alone(run, 10), rtol=0, atol=1e-10)


def test_what_does_not_go_with_a_mesh_is_refused_with_the_reason():
    said, *others = results(run_workers(meshes.refusals, 4, Run(batch_size=4)))
    assert others == [said] * 3
    apart = (
        "{} goes with workers of one process each, and mesh makes workers of several: leave it out, or use lb-bsp, dbs,"
        " bsp or batch_sizes, with a dataset that all have"
    )
    dims = "data_dims must name the dimensions of the mesh along which batches differ, some of ['dp', 'tp'], not {}: "
    dims += "give the mesh such names (mesh_dim_names), and name them in data_dims"
    parts = (
        "parameters of the model are split (DTensor), and without fully_shard each process would clip and save its own"
        " part of them as the whole: apply fully_shard(model, mesh=mesh['dp']) after parallelize_module, not"
        " DistributedDataParallel, and give prepare mesh and data_dims"
    )
    assert said == {
        "local-sgd": apart.format("the scheme 'local-sgd:period=2'"),
        "micro_batch": apart.format("the scheme 'bsp:micro_batch=2'"),
        "private": apart.format("data of the workers' own"),
        "process_group": apart.format("process_group"),
        "pipeline": "the stages of a pipeline (the dimension 'pp') cut each batch into a fixed number of micro-batches,"
        " and prepare does not make batches of them: use evenstep.Balancer, as in docs/meshes.md (Pipelines)",
        "no data_dims": dims.format("[]"),
        "other data_dims": dims.format("['fsdp']"),
        "no mesh": "data_dims names dimensions of a mesh, and there is none: give mesh, too",
        "slice": "the mesh has 2 of 4 processes: give the whole mesh, not a slice of it",
        **dict.fromkeys(("plain", "DDP", "no mesh for the plain"), parts),
        "another group": "the model is in DistributedDataParallel over the ranks [0, 1, 2, 3], which are not those of"
        " its part of the model along ['dp']: give it the mesh of these alone, as device_mesh=mesh['dp']",
    }
