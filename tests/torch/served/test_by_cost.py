"""Samples that differ in cost on parameter servers: claims are of equal cost, and each sample counts once."""

import numpy as np
import pytest
import torch
from support import served_faults, served_training, session_loops, training
from support.group_servers import run_grouped
from support.processes import results
from support.served import run_served
from support.served_faults import Kill
from support.training import Run
from torch.utils.data import DataLoader

import evenstep
from evenstep import ConfigError
from evenstep.core.samples import Costs

pytestmark = pytest.mark.multiprocess

COSTS = np.random.default_rng(1).lognormal(0, 1, 320)


def cost_of(run, epoch, positions):
    """In average samples."""
    order = training.epoch_order(run, epoch)
    units = Costs.of(run.options["cost"], run.samples).units
    return [float(units[each] / units.mean()) for each in order[positions].tolist()]


@pytest.mark.parametrize("scheme", ["asp", "ssp:bound=2", "dssp:lower=1,upper=3", "asp:exchange=overlapped"])
def test_a_claim_costs_about_what_its_size_does(tmp_path, scheme):
    run = Run(scheme=scheme, samples=320, batch_size=16, epochs=2, options={"cost": COSTS}, num_workers=1)
    values = results(run_served(served_training.train, 3, run, run_dir=tmp_path))
    sizes = []
    for epoch in range(2):
        claims = [part for value in values for part in value["positions"][epoch]]
        assert sorted(position for part in claims for position in part) == list(range(320))
        sizes += [sum(cost_of(run, epoch, part)) for part in claims]
    # The first claims, before all workers are here, and the last have other sizes. By count some 10 would be as close.
    assert sum(abs(cost - 16) < 2 for cost in sizes) >= 18
    assert all(value["ended"] == values[0]["ended"] for value in values)


@pytest.mark.parametrize("scheme", ["bsp:engine=server", "bsp:engine=server,servers=2,load=lb-bsp", "grouped:groups=1"])
def test_behind_a_barrier_it_is_the_mathematics_of_one_process(tmp_path, scheme):
    run = Run(scheme=scheme, samples=77, epochs=2, options={"cost": COSTS[:77]})
    servers = 2 if "servers=2" in scheme else 1
    values = results(run_served(served_training.train, 3, run, run_dir=tmp_path, servers=servers))
    for value in values:
        np.testing.assert_allclose(value["ended"], served_training.train_alone(run, 15), rtol=0, atol=1e-10)
    for epoch in range(2):
        slices = list(zip(*(value["positions"][epoch] for value in values), strict=False))[:5]
        costs = [[sum(cost_of(run, epoch, part)) for part in of_workers] for of_workers in slices]
        assert sorted(each for parts in slices[0] for each in parts) == list(range(15))
        longest = [max(max(cost_of(run, epoch, part)) for part in parts) for parts in slices]
        even = [max(each) <= max(1.2 * np.mean(each), 1.1 * most) for each, most in zip(costs, longest, strict=True)]
        assert "lb-bsp" in scheme or all(even)  # lb-bsp follows the workers' speeds.


def test_behind_a_group_server_too(tmp_path):
    run = Run(scheme="grouped:groups=0-1/2-3", samples=160, epochs=2, options={"cost": COSTS[:160]})
    values = results(run_grouped(served_training.train, [(0, 1), (2, 3)], run, run_dir=tmp_path, behind=[0, 1]))
    for epoch in range(2):
        claims = [part for value in values for part in value["positions"][epoch]]
        assert sorted(position for part in claims for position in part) == list(range(160))


def test_shares_of_a_loop_of_ones_own_are_claimed_by_cost(tmp_path):
    values = results(run_served(shares, 2, Run(samples=77), run_dir=tmp_path))
    assert sorted(position for value in values for own, _ in value for position in own) == list(range(77))
    for own, cost in (each for value in values for each in value):
        assert cost == pytest.approx(COSTS[own].sum() / COSTS[:77].mean(), rel=1e-6)


def shares(run):
    with evenstep.Session("asp", seed=run.seed) as session:
        model, optimizer = session_loops.prepared(run, session)
        taken = []
        for share in session.shares(run.samples, session_loops.GLOBAL_BATCH, cost=COSTS[:77]):
            training.step(model, optimizer, *session_loops.chosen(run, share))
            taken.append((list(share.positions[: share.samples]), share.cost))
        return taken


@pytest.mark.parametrize("scheme", ["asp", "bsp:engine=server"])
def test_what_a_killed_worker_had_claimed_is_computed_once(tmp_path, scheme):
    run = Run(scheme=scheme, samples=77, epochs=2, options={"cost": COSTS[:77]})
    faults = {(2, "backward"): Kill()}
    run_served(served_faults.train, 3, run, tmp_path, 1, faults, run_dir=tmp_path)
    assert served_faults.pushed(tmp_path) == {epoch: list(range(77)) for epoch in range(2)}


TOO_MANY = 2**24 + 1


def refusal(scheme, samples, *, padded):
    model, cost = torch.nn.Linear(2, 1), np.broadcast_to(1.0, (samples,))
    with pytest.raises(ConfigError) as caught:
        evenstep.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            DataLoader(range(samples), batch_size=4, collate_fn=training.stacked),
            cost=evenstep.Padded(cost) if padded else cost,
            scheme=scheme,
        )
    return str(caught.value)


def padded_refusal(scheme):
    return refusal(scheme, 20, padded=True)


def long_refusal(scheme):
    return refusal(scheme, TOO_MANY, padded=False)


@pytest.mark.parametrize(
    ("attempt", "scheme", "sentence"),
    [
        (padded_refusal, "asp", "which saves no padding: use lb-bsp, or give the lengths"),
        (padded_refusal, "bsp:engine=server", "which saves no padding: use lb-bsp, or give the lengths"),
        (long_refusal, "asp", f"possible for epochs of at most 16777216 samples, not {TOO_MANY}"),
    ],
)
def test_what_does_not_go_with_costs_on_servers_is_refused_in_one_sentence(tmp_path, attempt, scheme, sentence):
    (said,) = results(run_served(attempt, 1, scheme, run_dir=tmp_path))
    assert sentence in said
    assert "\n" not in said
