"""Promise 4 on servers: a worker that dies, stops or is cut off holds nobody, and no sample is lost or doubled."""

import signal

import numpy as np
import pytest
from support import served_faults, served_training
from support.processes import CONTEXT, results
from support.served import leaves, run_served, server_events
from support.served_faults import Kill, Plan
from support.training import Run

pytestmark = pytest.mark.multiprocess

HEARTBEAT_SECONDS = 2.0


def whole(run):
    return {epoch: list(range(run.samples)) for epoch in range(run.epochs)}


def others_finish(outcomes, victim):
    """The victim was killed, and the others have the same weights after every epoch."""
    assert outcomes[victim].exitcode == -signal.SIGKILL
    survivors = results([outcome for rank, outcome in enumerate(outcomes) if rank != victim])
    assert all(value["ended"] == survivors[0]["ended"] for value in survivors)
    assert np.isfinite(survivors[0]["ended"]).all()


@pytest.mark.parametrize(
    ("scheme", "servers", "victim", "faults"),
    [
        ("bsp:engine=server", 1, 1, {(3, "backward"): Kill()}),
        ("bsp:engine=server,servers=2,load=lb-bsp", 2, 0, {(3, "step"): Kill()}),
        ("ssp:bound=1", 1, 2, {(1, "backward"): Kill()}),
        ("asp", 1, 0, {(2, "step"): Kill()}),
        ("dssp:lower=1,upper=3", 1, 1, {(3, "step"): Kill()}),
        ("asp:exchange=overlapped", 1, 1, {(2, "step"): Kill()}),
    ],
)
def test_a_worker_killed_in_an_iteration_holds_nobody(tmp_path, scheme, servers, victim, faults):
    run = Run(scheme=scheme, samples=77, epochs=2)
    outcomes = run_served(served_faults.train, 3, run, tmp_path, victim, faults, run_dir=tmp_path, servers=servers)
    others_finish(outcomes, victim)
    assert served_faults.pushed(tmp_path) == whole(run)
    assert leaves(tmp_path)[victim] == ["has ended"]


@pytest.mark.parametrize(
    ("scheme", "servers", "plan", "committed"),
    [
        ("bsp:engine=server", 1, Plan("pushgradients", 3, served_faults.die_before), False),
        ("bsp:engine=server", 1, Plan("pushgradients", 3, served_faults.die_after), True),
        ("bsp:engine=server,servers=2", 2, Plan("stage", 2, served_faults.die_after, shard=1), False),
        ("ssp:bound=1", 1, Plan("pushgradients", 2, served_faults.die_within), False),
        ("dssp:lower=1,upper=3,servers=2", 2, Plan("pushgradients", 2, served_faults.die_before), False),
        ("asp", 1, Plan("pushgradients", 2, served_faults.die_after), True),
        ("asp", 1, Plan("rest", 1, served_faults.die_before), True),
    ],
)
def test_a_worker_killed_within_the_exchange_holds_nobody(tmp_path, scheme, servers, plan, committed):
    # Whoever pushes last in an epoch need not rest in it: one that is to rest gets many to do so in.
    run = Run(scheme=scheme, samples=77, epochs=20 if plan.operation == "rest" else 2)
    outcomes = run_served(served_faults.train, 3, run, tmp_path, 1, plan, run_dir=tmp_path, servers=servers)
    others_finish(outcomes, 1)
    lost = () if committed else {(1, plan.number)}
    assert served_faults.pushed(tmp_path, without=lost) == whole(run)
    assert leaves(tmp_path)[1] == ["has ended"]


def test_a_worker_killed_within_a_message_over_a_network_is_silent_and_holds_nobody(tmp_path):
    run = Run(scheme="ssp:bound=1,servers=2", samples=77, epochs=2)
    plan = Plan("stage", 2, served_faults.die_within, shard=1)
    outcomes = run_served(
        served_faults.train,
        3,
        run,
        tmp_path,
        1,
        plan,
        run_dir=tmp_path,
        servers=2,
        network=True,
        heartbeat_seconds=HEARTBEAT_SECONDS,
    )
    others_finish(outcomes, 1)
    assert served_faults.pushed(tmp_path, without={(1, 2)}) == whole(run)
    assert leaves(tmp_path)[1] == ["was silent for too long"]


@pytest.mark.parametrize(
    ("scheme", "held_at"), [("bsp:engine=server", 1), ("ssp:bound=1", 2), ("dssp:lower=1,upper=1", 2)]
)
def test_those_who_are_held_by_the_slowest_go_on_when_it_dies(tmp_path, scheme, held_at):
    run = Run(scheme=scheme, samples=77, epochs=2)
    outcomes = run_served(served_faults.train_held, 3, run, tmp_path, 2, held_at, CONTEXT.Barrier(3), run_dir=tmp_path)
    others_finish(outcomes, 2)
    assert served_faults.pushed(tmp_path) == whole(run)


@pytest.mark.parametrize(
    ("scheme", "servers", "network"),
    [("bsp:engine=server", 1, False), ("ssp:bound=1", 1, True), ("asp:servers=2", 2, True), ("dssp", 1, False)],
)
def test_a_worker_that_was_stopped_beyond_the_heartbeat_comes_back(tmp_path, scheme, servers, network):
    run = Run(scheme=scheme, samples=77, epochs=3)
    pid = CONTEXT.Value("q", 0)
    outcomes = run_served(
        served_faults.train_and_stop,
        3,
        run,
        tmp_path,
        1,
        2,
        pid,
        CONTEXT.Event(),
        CONTEXT.Barrier(3),
        run_dir=tmp_path,
        servers=servers,
        network=network,
        heartbeat_seconds=4 * HEARTBEAT_SECONDS,  # The others are not silent for so long, also on a busy machine.
    )
    values = results(outcomes)
    assert values[0]["ended"] == values[2]["ended"]
    assert values[1]["ended"][1:] == values[0]["ended"][1:]
    # The batch that was in hand when it stopped was the others' by the time it was pushed.
    assert served_faults.pushed(tmp_path, without={(1, 2)}) == whole(run)
    assert leaves(tmp_path)[1][0] == "was silent for too long"
    # On a busy machine another one may have been silent for too long, too.
    assert [event.worker for event in server_events(tmp_path, "join")].count(1) >= 2


@pytest.mark.parametrize(
    ("servers", "plan"),
    [
        (1, Plan("pushgradients", 3, served_faults.cut_before)),
        (1, Plan("pushgradients", 3, served_faults.cut_within)),
        (1, Plan("pushgradients", 3, served_faults.cut_after)),
        (2, Plan("stage", 3, served_faults.cut_within, shard=1)),
        (2, Plan("stage", 3, served_faults.cut_after, shard=1)),
        (2, Plan("pushgradients", 3, served_faults.cut_within)),
        (1, Plan("initialise", 1, served_faults.cut_within)),
        (1, Plan("begin", 1, served_faults.cut_after)),
        (2, Plan("begin", 2, served_faults.cut_within)),
    ],
)
def test_a_connection_that_is_cut_changes_nothing(tmp_path, servers, plan):
    # Of several workers the lowest that has come by then is asked for its weights, which need not be the victim.
    workers = 1 if plan.operation == "initialise" else 3
    run = Run(scheme=f"bsp:engine=server,servers={servers}", samples=77, epochs=2, batch_size=15 // workers)
    outcomes = run_served(
        served_faults.train, workers, run, tmp_path, 0, plan, run_dir=tmp_path, servers=servers, network=True
    )
    values = results(outcomes)
    assert values[0]["fired"]
    for value in values:
        np.testing.assert_allclose(value["ended"], served_training.train_alone(run, 15), rtol=0, atol=1e-10)
    assert served_faults.pushed(tmp_path) == whole(run)
    assert len(server_events(tmp_path, "join")) == workers
