"""Workers behind the server of their group: the same mathematics, and whoever dies in between holds nobody."""

import numpy as np
import pytest
from support import served_faults, served_training
from support.group_servers import Dying, run_grouped
from support.processes import CONTEXT, results
from support.served import leaves, server_events
from support.served_faults import Kill, Plan
from support.training import Run

pytestmark = pytest.mark.multiprocess

PAIRS = [(0, 1), (2, 3)]
TWO_GROUPS = "grouped:groups=0-1/2-3"
HEARTBEAT_SECONDS = 2.0


def whole(run):
    return {epoch: list(range(run.samples)) for epoch in range(run.epochs)}


@pytest.mark.parametrize(
    ("scheme", "network"), [("grouped:groups=1", False), ("bsp:engine=server,load=lb-bsp,clip=100", True)]
)
def test_one_group_behind_a_server_is_one_process(tmp_path, scheme, network):
    run = Run(scheme=scheme, samples=77, epochs=2)
    outcomes = run_grouped(served_training.train, [(0, 1, 2)], run, run_dir=tmp_path, behind=[0], network=network)
    for value in results(outcomes):
        np.testing.assert_allclose(value["ended"], served_training.train_alone(run, 15), rtol=0, atol=1e-10)


def test_behind_a_barrier_across_groups_it_makes_no_difference_who_has_a_server(tmp_path):
    run = Run(scheme=f"{TWO_GROUPS},across=bsp", samples=77, epochs=2, batch_size=4)
    ended = []
    for behind in ([], [1], [0, 1]):
        folder = tmp_path / str(len(behind))
        folder.mkdir()
        values = results(run_grouped(served_training.train, PAIRS, run, run_dir=folder, behind=behind))
        assert all(value["ended"] == values[0]["ended"] for value in values)
        ended.append(values[0]["ended"])
    np.testing.assert_allclose(ended[1:], [ended[0]] * 2, rtol=0, atol=1e-10)


def test_optimizer_state_goes_to_the_parent_and_comes_back(tmp_path):
    run = Run(scheme=TWO_GROUPS, samples=77, epochs=2, optimizer="adam")
    values = results(run_grouped(served_faults.train_and_save, PAIRS, run, run_dir=tmp_path, behind=[1]))
    assert all(value == values[0] for value in values)
    assert max(values[0]) > 0


@pytest.mark.parametrize("across", ["asp", "ssp:bound=1", "dssp:lower=0;upper=2"])
def test_members_of_a_group_have_the_same_weights_at_each_release(tmp_path, across):
    run = Run(scheme=f"{TWO_GROUPS},inside=lb-bsp,across={across}", samples=160, epochs=2, num_workers=1)
    values = results(run_grouped(served_faults.train_and_look, PAIRS, run, tmp_path, run_dir=tmp_path, behind=[0, 1]))
    for first, second in PAIRS:
        one, other = values[first], values[second]
        common = one.keys() & other.keys()
        assert len(common) > 8
        assert all(one[version] == other[version] for version in common)
    assert served_faults.pushed(tmp_path) == whole(run)
    # A group's pushes are one commit, and one message; at the end of an epoch there may be a sample for one alone.
    pushes, tallies = len(server_events(tmp_path, "push")), server_events(tmp_path, "tally")
    assert pushes / 2 <= sum(event.commits for event in tallies) < 0.7 * pushes


@pytest.mark.parametrize(
    ("faults", "committed"),
    [
        ({(2, "backward"): Kill()}, True),
        (Plan("pushgradients", 3, served_faults.die_before), False),
        (Plan("pushgradients", 2, served_faults.die_within), False),
    ],
)
def test_a_worker_killed_behind_a_group_server_holds_nobody(tmp_path, faults, committed):
    run = Run(scheme=f"{TWO_GROUPS},across=ssp:bound=1", samples=77, epochs=2)
    outcomes = run_grouped(served_faults.train, PAIRS, run, tmp_path, 3, faults, run_dir=tmp_path, behind=[0, 1])
    assert outcomes[3].exitcode == -9
    survivors = results(outcomes[:3])
    assert all(value["ended"] == survivors[0]["ended"] for value in survivors)
    lost = () if committed else {(3, faults.number)}
    assert served_faults.pushed(tmp_path, without=lost) == whole(run)
    assert leaves(tmp_path)[3] == ["has ended"]


def test_a_group_that_loses_its_last_member_leaves(tmp_path):
    run = Run(scheme=f"{TWO_GROUPS},across=bsp", samples=77, epochs=2)
    both = {2: {(2, "backward"): Kill()}, 3: {(3, "backward"): Kill()}}
    outcomes = run_grouped(served_faults.train_each, PAIRS, run, tmp_path, both, run_dir=tmp_path, behind=[1])
    survivors = results(outcomes[:2])
    assert survivors[0]["ended"] == survivors[1]["ended"]
    assert served_faults.pushed(tmp_path) == whole(run)
    assert leaves(tmp_path)[2] == leaves(tmp_path)[3] == ["has ended"]


def test_a_worker_stopped_beyond_the_heartbeat_comes_back_behind_its_group_server(tmp_path):
    run = Run(scheme="grouped:groups=1", samples=77, epochs=3)
    pid = CONTEXT.Value("q", 0)
    outcomes = run_grouped(
        served_faults.train_and_stop, [(0, 1, 2)], run, tmp_path, 1, 2, pid, CONTEXT.Event(), CONTEXT.Barrier(3),
        run_dir=tmp_path, behind=[0], heartbeat_seconds=4 * HEARTBEAT_SECONDS,
    )  # fmt: skip
    values = results(outcomes)
    assert values[0]["ended"] == values[2]["ended"]
    assert values[1]["ended"][1:] == values[0]["ended"][1:]
    assert served_faults.pushed(tmp_path, without={(1, 2)}) == whole(run)
    assert leaves(tmp_path)[1][0] == "was silent for too long"


@pytest.mark.parametrize("dying", [Dying(group=1, number=4), Dying(group=None, number=9)])
def test_a_server_that_is_killed_is_restarted_and_no_sample_is_lost(tmp_path, dying):
    run = Run(scheme=f"{TWO_GROUPS},across=ssp:bound=2", samples=231, epochs=2)
    outcomes = run_grouped(
        served_faults.train, PAIRS, run, tmp_path, -1, {}, run_dir=tmp_path, behind=[0, 1], dying=dying
    )
    values = results(outcomes)
    # The others may have ended the first epoch by the time that those of a group come back.
    assert all(value["ended"][-1] == values[0]["ended"][-1] for value in values)
    joined = sorted(event.worker for event in server_events(tmp_path, "join"))
    if dying.group is None:
        assert joined == [0, 0, 1, 1, 2, 2, 3, 3]
        assert len(server_events(tmp_path, "restored")) == 1
        return
    # The other group went on with the parent as it was, and what was pushed to the server that died was done again.
    assert joined == [0, 1, 2, 2, 3, 3]
    assert leaves(tmp_path)[2][0] == leaves(tmp_path)[3][0] == "has ended"
    assert sum(event.samples for event in server_events(tmp_path, "push")) == run.epochs * run.samples


def test_a_group_whose_server_is_gone_for_good_ends_in_an_error_and_the_others_finish(tmp_path):
    run = Run(scheme=f"{TWO_GROUPS},across=bsp", samples=77, epochs=2, options={"timeout": 3.0})
    dying = Dying(group=1, number=3, restarts=0)
    outcomes = run_grouped(served_faults.train, PAIRS, run, tmp_path, -1, {}, run_dir=tmp_path, behind=[1], dying=dying)
    for outcome in outcomes[2:]:
        assert outcome.error.startswith("WorkerLostError: the servers did not answer for 3 s")
    survivors = results(outcomes[:2])
    assert survivors[0]["ended"] == survivors[1]["ended"]
    assert sum(event.samples for event in server_events(tmp_path, "push")) == run.epochs * run.samples
