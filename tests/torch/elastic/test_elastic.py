"""Members come and go: every sample counts once, steps have one size, and the weights are those of one process."""

from collections import defaultdict
from dataclasses import replace

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


def test_replicas_may_fail_at_any_moment_of_a_step_and_come_back():
    faults = {(0, 8): "kill in backward", (1, 16): "kill before step", (2, 24): "kill after step", (3, 32): "raise"}
    run = Elastic(replicas=4, faults=faults, waits={14: 0, 22: 1, 30: 2, 38: 3}, slow=("2=4x",))
    outcome = run_replicas(run)
    members = require_as_alone(run, outcome)
    assert {(slot, life) for slot, life, code in outcome.exits if code} == {(slot, 0) for slot in range(4)}
    assert {(line["slot"], line["life"]) for line in outcome.steps} == {(s, life) for s in range(4) for life in (0, 1)}
    assert members[-1] == 4
    last = [line["sizes"] for line in outcome.steps if line["step"] == 79]
    assert min(last[0]) < max(last[0]), "sizes follow speeds"


def test_two_replicas_that_die_in_the_same_step_leave_it_to_the_third():
    faults = {(0, 10): "kill before step", (1, 10): "kill in backward"}
    run = Elastic(faults=faults, num_workers=1, epochs=1)
    members = require_as_alone(run, run_replicas(run, restarts=0))
    assert members[9:11] == [3, 1]
    assert members[-1] == 1


def test_a_stopped_replica_is_left_out_and_the_others_go_on():
    run = Elastic(faults={(1, 10): "stop"}, timeout_seconds=3, epochs=1)
    assert require_as_alone(run, run_replicas(run))[-1] == 2


def test_a_checkpoint_of_one_replica_is_where_other_replicas_begin(tmp_path):
    """Saved in mid-epoch by one of three, and restored by two."""
    run = Elastic(samples=288, checkpoint=str(tmp_path / "saved.pt"))
    first = run_replicas(replace(run, until=7))
    second = run_replicas(replace(run, replicas=2))
    assert {code for outcome in (first, second) for *_, code in outcome.exits} == {0}
    for line in second.steps:
        line["step"] += 7
    assert require_as_alone(run, replace(second, steps=first.steps + second.steps)) == 7 * [3] + 17 * [2]
