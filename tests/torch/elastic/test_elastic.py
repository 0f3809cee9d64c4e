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
    lost = {(line["epoch"], position) for line in outcome.steps if line["nan"] for position in line["positions"]}
    references = alone(run, lost)
    for name, found in outcome.weights.items():
        least = min(float((torch.tensor(found, dtype=torch.float64) - each).abs().max()) for each in references)
        assert least < 1e-10, f"process {name} is {least} from one process"
    per_epoch = -(-run.samples // run.global_batch_size)
    by_step, alike = defaultdict(list), defaultdict(list)
    for line in outcome.steps:
        alike[line["step"], line["slot"], line["life"]].append(line["positions"])
        if line["rank"] == 0 or "tp" not in run.split:
            by_step[line["step"]].append(line)
    if "tp" in run.split:  # The processes of a replica compute the same samples.
        assert all(positions == others[0] for others in alike.values() for positions in others)
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


def test_the_weights_are_those_of_one_process_after_twenty_deaths_and_joins():
    kinds = ["kill in backward", "kill before step", "kill after step", "raise"]
    deaths = [(index % 4, 4 + 7 * index) for index in range(10)]
    faults = {death: kinds[index % 3 if index else 3] for index, death in enumerate(deaths)}
    waits = {step + 5: [(slot, index // 4 + 1)] for index, (slot, step) in enumerate(deaths)}
    run = Elastic(replicas=4, faults=faults, waits=waits, slow=("2=4x",), options={"scheme": "lb-bsp:nonfinite=skip"})
    outcome = run_replicas(run, restarts=9)
    members = require_as_alone(run, outcome)
    died = [(slot, life) for slot, life, code in outcome.exits if code]
    joined = {(line["slot"], line["life"]) for line in outcome.steps if line["life"]}
    assert len(died) == len(joined) == 10, (died, joined)
    assert members[-1] == 4
    last = [line["sizes"] for line in outcome.steps if line["step"] == 79]
    assert min(last[0]) < max(last[0]), "sizes follow speeds"


def test_two_replicas_die_in_one_step_and_one_of_them_comes_back_with_other_data():
    faults = {(0, 10): "kill before step", (1, 10): "kill in backward"}
    waits = {20: [(0, 1)], 25: [(0, 2)], 30: [(0, 3)]}
    other = {(0, 1): 961, (0, 2): None}
    run = Elastic(faults=faults, waits=waits, other=other, num_workers=1, epochs=1, habit="units")
    outcome = run_replicas(run, restarts={0: 3})
    members = require_as_alone(run, outcome)
    assert members[9] == 3 > members[10]
    assert members[-1] == 2
    assert "961" in outcome.errors["0-1"]
    assert "other samples" in outcome.errors["0-2"]
    assert not any(". " in error for error in outcome.errors.values()), "one sentence"
    # The one that was left had fetched its part of the next slices already, and needed all of them.
    for process in ("2-0", "0-3"):
        compared = {0, 480, 959}  # The members compare the first, the middle and the last sample where they disagree.
        reads = [each for each in outcome.reads[process] if each not in compared]
        assert len(set(reads)) == len(reads), f"{process} read a sample again"
    losses = {line["step"]: line["loss"] for line in outcome.steps}
    assert all(line["loss"] == losses[line["step"]] for line in outcome.steps)


def test_a_stopped_replica_is_left_out_and_the_others_go_on():
    """And one that computes a NaN then is named by its place, though its rank is another."""
    faults = {(1, 10): "stop", (2, 20): "nan"}
    run = Elastic(faults=faults, timeout_seconds=3, epochs=1, options={"scheme": "lb-bsp:nonfinite=skip"})
    outcome = run_replicas(run)
    assert require_as_alone(run, outcome)[-1] == 2
    skipped = [each for each in outcome.warnings if "left out" in each]
    assert [each.partition(" left")[0] for each in skipped] == ["worker 2"]


@pytest.mark.parametrize("split", [(), ("tp",)])
def test_a_checkpoint_of_one_replica_is_where_other_replicas_begin(split, tmp_path):
    """Saved in mid-epoch by one of three, and restored by two; a NaN of another one before is left out."""
    options = {"scheme": "lb-bsp:nonfinite=skip"}
    run = Elastic(samples=288, checkpoint=str(tmp_path / "saved"), options=options, split=split)
    first = run_replicas(replace(run, until=7, faults={(1, 5): "nan"}))
    assert {(line["step"], line["slot"]) for line in first.steps if line["nan"]} == {(5, 1), (6, 1)}
    second = run_replicas(replace(run, replicas=2))
    assert {code for outcome in (first, second) for *_, code in outcome.exits} == {0}
    for line in second.steps:
        line["step"] += 7
    assert require_as_alone(run, replace(second, steps=first.steps + second.steps)) == 7 * [3] + 17 * [2]


@pytest.mark.parametrize("split", [("shard",), ("shard", "tp")])
def test_replicas_of_several_processes(split):
    """One process of a replica dies, and the replica with it. Of a sharded one, each process has its own samples."""
    faults = {(0, 4): "kill in backward", (1, 10): "raise", (0, 16): "kill before step", (2, 22): "kill after step"}
    waits = {7: [(0, 1)], 13: [(1, 1)], 19: [(0, 2)], 25: [(2, 1)]}
    run = Elastic(epochs=1, split=split, faults=faults, waits=waits, slow=("2=4x",))
    outcome = run_replicas(run, restarts=2)
    members, each = require_as_alone(run, outcome), 2 if split == ("shard",) else 1
    assert members[-1] == 3 * each
    died = [(slot, life) for slot, life, code in outcome.exits if code]
    joined = {(line["slot"], line["life"]) for line in outcome.steps if line["life"]}
    assert len(died) == len(joined) == 4, (died, joined)
    last = next(line["sizes"] for line in outcome.steps if line["step"] == 39)
    assert max(last) > 1.5 * min(last), "sizes follow speeds"
