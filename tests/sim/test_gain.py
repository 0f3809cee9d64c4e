"""What a run claims to have gained over equal sizes, beside a run that has them: in virtual time both are exact."""

from dataclasses import replace
from statistics import median

import pytest

from evenstep.report.overview import overview_of
from evenstep.report.recorded import recorded_run

JITTER = '[disturbances.noise]\nkind = "jitter"\nspread = "20 %"\n'
SPELL = '[disturbances.spell]\nkind = "from"\nfactor = 4\nfirst = 300\nuntil = 900\n'


def claimed(run, cluster, scheme, **more):
    """What a run of this scheme claims, and what it gained over `bsp`."""
    result, kept, _ = run(cluster, scheme, logged=True, **more)
    overview = overview_of(scheme, recorded_run(event for each in kept for event in each.events))
    return overview, result.samples_per_second / run(cluster, "bsp", **more).samples_per_second


@pytest.mark.parametrize("scheme", ["lb-bsp", "lb-bsp:tuner=pairwise", "local-sgd:period=2,load=lb-bsp"])
def test_a_run_claims_what_it_gained_although_time_has_a_fixed_part(devices, run, scheme):
    missed, covered, slowdowns = [], 0, []
    for seed in range(1, 6):
        cluster = devices(1, 1, 2, 4, fixed_ms=40, more=JITTER, disturb='"noise"', seed=seed)
        overview, gained = claimed(run, cluster, scheme, batch=128, iterations=600, epoch_samples=128 * 60)
        assert 1.2 < gained < 1.7
        speed_up = overview.summary.over_equal_sizes
        missed.append(speed_up.estimate / gained)
        covered += speed_up.low * 0.98 <= gained <= speed_up.high * 1.02
        slowdowns.append(overview.summary.workers[3].slowdown)
    assert covered >= 4
    assert median(missed) == pytest.approx(1.0, abs=0.25)
    assert median(slowdowns) == pytest.approx((40 + 32 * 4) / (40 + 32), rel=0.35)


def test_the_first_epoch_of_dbs_is_what_its_later_ones_are_compared_with(devices, run):
    cluster = devices(1, 1, 2, 4, fixed_ms=5, more=JITTER, disturb='"noise"')
    overview, gained = claimed(run, cluster, "dbs", batch=128, iterations=600, epoch_samples=128 * 60)
    assert gained > 1.5
    assert overview.summary.over_equal_sizes.estimate == pytest.approx(gained, rel=0.15)


def test_slowness_that_comes_and_goes_is_claimed_where_it_was(devices, run):
    calm, disturbed = (
        devices(1, 1, 1, 1, more=JITTER + SPELL, disturb=names) for names in ('"noise"', '"noise", "spell"')
    )
    cluster = replace(calm, workers=(*calm.workers[:3], disturbed.workers[3]))
    overview, gained = claimed(run, cluster, "lb-bsp", batch=128, iterations=1200)
    assert gained > 1.3
    assert overview.summary.over_equal_sizes.low * 0.95 <= gained <= overview.summary.over_equal_sizes.high * 1.05


def test_equal_workers_are_claimed_nothing(devices, run):
    cluster = devices(1, 1, 1, 1, more=JITTER, disturb='"noise"')
    overview, gained = claimed(run, cluster, "lb-bsp", batch=128, iterations=400)
    assert overview.summary.over_equal_sizes.estimate == pytest.approx(1.0, abs=0.03)
    assert gained == pytest.approx(1.0, abs=0.03)


def test_servers_claim_no_gain_over_equal_sizes(devices, run):
    _, kept, server = run(devices(1, 1, 2, 4), "ssp:load=lb-bsp", logged=True)
    events = [event for each in kept for event in each.events]
    overview = overview_of("ssp", recorded_run(events, server.events))
    assert overview.summary.over_equal_sizes is None
    assert overview.summary.of_ideal > 0.5
