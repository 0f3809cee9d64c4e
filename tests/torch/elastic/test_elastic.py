"""Members come and go: every sample counts once, in steps of the same size, and the weights are those of one process."""

from collections import defaultdict

import pytest
import torch

from support.elastic import Elastic, alone, run_replicas

pytest.importorskip("torchft")

pytestmark = pytest.mark.multiprocess


def require_as_alone(run, outcome):
    """Check the promise; returns the numbers of members, step by step."""
    assert outcome.weights
    references = alone(run)
    for name, found in outcome.weights.items():
        least = min(float((torch.tensor(found, dtype=torch.float64) - each).abs().max()) for each in references)
        assert least < 1e-10, f"process {name} is {least} from one process"
    per_epoch = -(-run.samples // run.global_batch_size)
    by_step = defaultdict(list)
    for line in outcome.steps:
        by_step[line["step"]].append(line)
    assert sorted(by_step) == list(range(per_epoch * run.epochs))
    for step, lines in by_step.items():
        assert len({str(line["sizes"]) for line in lines}) == 1
        positions = sorted(position for line in lines for position in line["positions"])
        start = step % per_epoch * run.global_batch_size
        slice_ = range(start, min(start + run.global_batch_size, run.samples))
        assert sum(lines[0]["sizes"]) == len(slice_)
        if len(lines) == len(lines[0]["sizes"]):  # None of them died between the commit and its record.
            assert positions == list(slice_)
        assert len(set(positions)) == len(positions)
    return [len(by_step[step][0]["sizes"]) for step in sorted(by_step)]


def test_a_replica_that_is_killed_and_comes_back_changes_nothing_but_the_sizes():
    run = Elastic(faults={(1, 20): "kill"}, waits={40: 1}, slow=("2=4x",))
    outcome = run_replicas(run)
    members = require_as_alone(run, outcome)
    assert (1, 0, -9) in outcome.exits
    assert 2 in members[20:45]
    assert members[-1] == 3


@pytest.mark.parametrize(
    "fault", ["raise", "exit", "kill in backward", "kill before step", "kill after step"]
)
def test_a_replica_may_fail_at_any_moment_of_a_step(fault):
    run = Elastic(faults={(0, 10): fault, (2, 30): fault}, waits={45: 0, 50: 2})
    outcome = run_replicas(run)
    members = require_as_alone(run, outcome)
    assert {(slot, life) for slot, life, code in outcome.exits if code} == {(0, 0), (2, 0)}
    assert members[-1] == 3


def test_two_replicas_that_die_in_the_same_step_leave_the_others_to_do_it():
    run = Elastic(faults={(0, 10): "kill before step", (1, 10): "kill in backward"}, waits={20: 0, 25: 1}, num_workers=1)
    outcome = run_replicas(run)
    members = require_as_alone(run, outcome)
    assert 1 in members
    assert members[-1] == 3


def test_a_stopped_replica_is_left_out_and_the_others_go_on():
    run = Elastic(faults={(1, 10): "stop"}, timeout_seconds=3)
    outcome = run_replicas(run)
    assert require_as_alone(run, outcome)[-1] == 2
