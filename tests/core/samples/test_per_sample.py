"""What samples take beside their cost is found from the iterations of all workers, and only if it is there."""

import numpy as np
import pytest

from evenstep.core.samples import Costs, CostSharing, EpochCosts, Ledger, Lookahead, PerSample

ITERATIONS, SLICE = 64, 96


def trained(part, *, speeds=(1.0, 1.0, 2.0, 4.0), noise=0.02, changes_at=None, fixed=0.0, seed=1):
    """What is found after a run in which this part of an average sample's time does not depend on its cost.

    Also the latest worker's time over the mean, averaged over the last iterations.
    """
    generator = np.random.default_rng(seed)
    costs = generator.lognormal(0, 1, ITERATIONS * SLICE)
    speeds, found, late = np.array(speeds), PerSample(), []
    sharing = CostSharing(
        costs=EpochCosts(Costs.of(costs, len(costs)), np.arange(len(costs))),
        minimum=2,
        maximum=lambda: np.full(len(speeds), SLICE),
        weights=lambda: None,
        per_sample=found,
    )
    sizes = (SLICE * speeds / speeds.sum()).astype(int)
    window = Lookahead(
        Ledger(length=len(costs), global_batch_size=SLICE),
        worker=0,
        sizes=lambda: sizes,
        depth=2,
        minimum=2,
        sharing=sharing,
    )
    for number in range(ITERATIONS):
        share = window.share()
        now = speeds * (np.array([1, 1, 1, 0.5]) if changes_at is not None and number >= changes_at else 1.0)
        loads = (1 - part) * share.loads.costs / 1000 + part * share.sizes
        times = (fixed + loads) / now * generator.normal(1, noise, len(speeds))
        late.append((loads / speeds).max() / (loads / speeds).mean())
        found.observe(share.sizes, share.loads.costs, np.rint(1e5 * times).astype(np.int64))
        window.advance()
        window.replan()
    return found.thousandths / 1000, float(np.mean(late[-16:]))


@pytest.mark.parametrize("part", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("seed", range(4))
def test_the_time_of_each_sample_is_found_and_shared_out(part, seed):
    found, late = trained(part, seed=seed)
    assert found == pytest.approx(part, abs=0.05)
    assert late < 1.04


@pytest.mark.parametrize("seed", range(8))
def test_where_time_follows_cost_nothing_is_found(seed):
    assert trained(0.0, seed=seed)[0] == 0.0


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_noise_is_not_taken_for_it(noise):
    assert max(trained(0.0, noise=noise, seed=seed)[0] for seed in range(8)) == 0.0


def test_a_worker_whose_speed_changes_does_not_mislead_the_others():
    assert trained(0.3, changes_at=40)[0] == pytest.approx(0.3, abs=0.06)
    assert trained(0.0, changes_at=40)[0] == 0.0


def test_without_it_the_late_worker_costs_more():
    costs, speeds = np.random.default_rng(3).lognormal(0, 1, SLICE), np.ones(4, dtype=np.int64)
    shares = {}
    for part in (0.0, 0.5):
        of_samples = PerSample()
        of_samples.thousandths = round(1000 * part)
        sharing = CostSharing(
            costs=EpochCosts(Costs.of(costs, SLICE), np.arange(SLICE)),
            minimum=2,
            maximum=lambda: np.full(4, SLICE),
            weights=lambda: None,
            per_sample=of_samples,
        )
        owners = sharing.owners(Ledger(length=SLICE, global_batch_size=SLICE).slice(0), SLICE // 4 * speeds)
        loads = np.bincount(owners, weights=0.5 * costs / costs.mean() + 0.5)
        shares[part] = loads.max() / loads.mean()
    assert shares[0.5] < 1.01 < shares[0.0]
