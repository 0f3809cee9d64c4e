"""Local steps while members come and go: a period counts as a whole or not at all, and each sample in one that does."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from support.elastic import Elastic, alone_locally, members_of, run_replicas

pytest.importorskip("torchft")

pytestmark = pytest.mark.multiprocess

# Replica 1 does not come back.
FAULTS = {(0, 3): "kill in backward", (1, 9): "raise", (2, 15): "kill before step", (0, 21): "raise"}
WAITS = {6: [(0, 1)], 18: [(2, 1)], 24: [(0, 2)]}


def require_as_alone(run, outcome):
    """Check the promise; returns the numbers of members, period by period."""
    assert outcome.weights
    references = alone_locally(run, outcome.steps)
    for name, found in outcome.weights.items():
        least = min(float((torch.tensor(found, dtype=torch.float64) - each).abs().max()) for each in references)
        assert least < 1e-10, f"process {name} is {least} from one process"
    by_period = defaultdict(list)
    for line in outcome.steps:
        by_period[line["step"]].append(line)
    assert sorted(by_period) == list(range(len(by_period)))
    counted = defaultdict(list)
    for lines in by_period.values():
        for line in (line for member in members_of(run, lines) for line in member):
            counted[line["epoch"]] += line["positions"]
            assert len(line["sizes"]) == len(lines[0]["sizes"])
    assert set(counted) == set(range(run.epochs))
    for positions in counted.values():
        assert sorted(positions) == list(range(run.samples))
    return [len(by_period[period][0]["sizes"]) for period in sorted(by_period)]


@pytest.mark.parametrize("scheme", ["local-sgd:period=4", "diloco:period=4,load=lb-bsp"])
def test_the_weights_are_those_of_the_algorithm_in_one_process_after_deaths_and_joins(scheme):
    """20 samples are left for the last slice, and two iterations for the last period of an epoch."""
    momentum = 0.0 if scheme.startswith("diloco") else 0.9  # Of DiLoCo a replica that joins has another one's.
    slow = ("2=3x",) if "lb-bsp" in scheme else ()
    run = Elastic(
        samples=1000,
        epochs=3,
        momentum=momentum,
        slow=slow,
        faults=FAULTS,
        waits=WAITS,
        late=2,
        options={"scheme": scheme},
    )
    outcome = run_replicas(run, restarts={0: 2, 2: 1})
    members = require_as_alone(run, outcome)
    died = [(slot, life) for slot, life, code in outcome.exits if code]
    joined = {(line["slot"], line["life"]) for line in outcome.steps if line["life"]}
    assert (len(died), joined) == (4, {(0, 1), (2, 1), (0, 2)})
    assert members[8] == 3
    assert members[-1] == 2
    last = next(line["sizes"] for line in outcome.steps if line["step"] == len(members) - 2)
    assert (max(last) > 1.5 * min(last)) == bool(slow)


def test_numbers_of_steps_by_speed_follow_those_that_are_there():
    """The batches of a period stay, 12 of 8 samples, whoever takes them."""
    scheme = "diloco:period=4,steps=speed"
    run = Elastic(
        samples=1920,
        global_batch_size=0,
        momentum=0.0,
        decay=1.0,
        slow=("2=3x",),
        faults={(0, 6): "kill in backward", (1, 15): "kill in backward"},
        late=1,
        waits={9: [(0, 1)]},
        options={"scheme": scheme},
    )
    outcome = run_replicas(run, restarts={0: 1})
    members = require_as_alone(run, outcome)
    assert members[12] == 3
    assert members[-1] == 2
    assert len(members) == 2 * 1920 // 96


@pytest.mark.parametrize("scheme", ["local-sgd:period=4", "diloco:period=4"])
def test_masks_frozen_parameters_and_a_member_whose_state_is_not_finite(scheme):
    momentum = 0.0 if scheme.startswith("diloco") else 0.9
    options, faults = {"scheme": scheme}, {(1, 3): "nan once"}
    run = Elastic(samples=480, momentum=momentum, habit="masked", faults=faults, late=1, options=options)
    outcome = run_replicas(run)
    assert require_as_alone(run, outcome) == 10 * [3]
    assert [line["step"] for line in outcome.steps if line["nan"]] == [3]


def test_members_that_all_count_nothing_have_equal_weights():
    run = Elastic(samples=480, habit="no units", options={"scheme": "local-sgd:period=4"})
    assert require_as_alone(run, run_replicas(run)) == 10 * [3]


def test_a_checkpoint_within_a_period_ends_it_and_is_where_others_begin(tmp_path):
    run = Elastic(samples=480, checkpoint=str(tmp_path / "saved.pt"), options={"scheme": "local-sgd:period=4"})
    first = run_replicas(replace(run, until=7))
    second = run_replicas(replace(run, replicas=2))
    assert {code for outcome in (first, second) for *_, code in outcome.exits} == {0}
    for line in second.steps:
        line["step"] += 8
    assert require_as_alone(run, replace(second, steps=first.steps + second.steps)) == 8 * [3] + 3 * [2]
