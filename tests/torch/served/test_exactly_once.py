"""Promise 2 for pushes: whatever is lost, repeated, late or swapped on the way, each push is committed exactly once."""

import pytest
from support.faulty import Fault
from support.memory_servers import SAMPLES, WORKERS, Trial

EVERY = {Fault.DROP: 0.08, Fault.DUPLICATE: 0.08, Fault.DELAY: 0.06, Fault.REORDER: 0.08}


def positions(trial, epoch):
    return sorted(position for number, part in trial.committed if number == epoch for position in part)


def each_once(trial):
    assert [positions(trial, epoch) for epoch in range(2)] == [list(range(SAMPLES))] * 2
    assert trial.primary.coordinator.samples == 2 * SAMPLES
    assert len([event for event in trial.events.kept if event.kind == "join"]) == WORKERS


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
def test_under_a_barrier_the_weights_are_those_of_an_undisturbed_run(tmp_path, shards, local):
    scheme = f"bsp:engine=server,servers={shards}"
    undisturbed = Trial(tmp_path / "calm", scheme, shards, {}, local=local)
    expected = undisturbed.run()
    each_once(undisturbed)
    assert not undisturbed.fired
    for seed in range(1, 4):
        trial = Trial(tmp_path / str(seed), scheme, shards, EVERY, seed=seed, local=local)
        assert trial.run() == expected
        each_once(trial)
        assert trial.primary.coordinator.version == undisturbed.primary.coordinator.version == 12
        assert set(trial.fired) == set(Fault)


@pytest.mark.parametrize("scheme", ["asp", "ssp:bound=1,servers=2", "dssp:lower=1,upper=3"])
def test_without_a_barrier_each_push_is_committed_once(tmp_path, scheme):
    shards = 2 if "servers=2" in scheme else 1
    for seed in range(3):
        trial = Trial(tmp_path / str(seed), scheme, shards, EVERY, seed=seed, local=seed > 0)
        weights = trial.run()
        each_once(trial)
        assert weights[0] == weights[1] == weights[2]
        assert {each.version for each in trial.shard_states} == {trial.primary.coordinator.version}
        assert set(trial.fired) == set(Fault)


@pytest.mark.parametrize(("scheme", "local"), [("asp", True), ("bsp:engine=server", False)])
def test_claims_by_cost_are_committed_once(tmp_path, scheme, local):
    costs = [4 if number % 7 else 100 for number in range(SAMPLES)]
    trial = Trial(tmp_path, scheme, 1, EVERY, seed=1, local=local, costs=costs)
    trial.run()
    each_once(trial)
    assert set(trial.fired) == set(Fault)
    claimed = [part for worker in trial.workers.values() for _, part, _ in worker.pushed]
    # By count no claim has more than 5; a slice of the barrier has 15, and more than that is one worker's of none.
    assert 5 < max(len(part) for part in claimed) < 15


@pytest.mark.parametrize("fault", list(Fault))
def test_one_kind_of_fault_at_a_time(tmp_path, fault):
    expected = Trial(tmp_path / "calm", "bsp:engine=server", 1, {}).run()
    trial = Trial(tmp_path / "troubled", "bsp:engine=server", 1, {fault: 0.25}, seed=5)
    assert trial.run() == expected
    each_once(trial)
    assert set(trial.fired) == {fault}
