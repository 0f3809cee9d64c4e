"""Samples that differ in cost, in virtual time: shared out, claimed and measured as in a real run."""

import numpy as np
import pytest

from evenstep.cluster import parse_cluster
from evenstep.cluster.costs import LogNormal, Uniform, draw_costs
from evenstep.core.errors import ConfigError
from evenstep.schemes import parse_scheme
from evenstep.sim import Scenario, simulate

TEXTS = LogNormal(1.0)


def iterations(kept):
    """By worker: the iterations that it wrote down."""
    return [[event for event in each.events if event.kind == "iteration"] for each in kept]


def test_an_iteration_takes_as_long_as_what_costs_most_and_all_cost_alike(devices, run):
    result, kept, _ = run(devices(1, 1, 1), "bsp", batch=48, iterations=40, costs=Uniform(1, 9), logged=True)
    of_all = list(zip(*iterations(kept), strict=True))
    costs = np.array([[event.cost for event in of_workers] for of_workers in of_all])
    assert result.seconds == pytest.approx(costs.max(axis=1).sum() / 1000)
    assert (costs.max(axis=1) <= 1.02 * costs.mean(axis=1)).all()
    assert all(sum(event.samples for event in of_workers) == 48 for of_workers in of_all)
    seconds = np.array([[event.compute_seconds for event in of_workers] for of_workers in of_all])
    np.testing.assert_allclose(seconds, costs / 1000, atol=1e-6)


@pytest.mark.parametrize(("scheme", "least"), [("asp", 0.99), ("asp:load=lb-bsp", 0.99), ("lb-bsp", 0.93)])
def test_cost_is_computed_at_the_sum_of_the_speeds(devices, run, scheme, least):
    result, kept, _ = run(devices(1, 1, 2, 4), scheme, batch=64, iterations=400, costs=TEXTS, logged=True)
    cost = sum(event.cost for events in iterations(kept) for event in events)
    speeds = 1000 * (1 + 1 + 1 / 2 + 1 / 4)
    assert least <= cost / result.seconds / speeds <= 1.001
    assert result.samples == 64 * 400


@pytest.mark.parametrize("scheme", ["bsp", "lb-bsp", "ssp:bound=2", "bsp:engine=server"])
def test_costs_that_are_equal_change_nothing_that_matters(devices, run, scheme):
    cluster = devices(1, 1, 3)
    plain = run(cluster, scheme, batch=48, iterations=60)
    costs = run(cluster, scheme, batch=48, iterations=60, costs=[7.0] * 100)
    assert costs.seconds == pytest.approx(plain.seconds, rel=1e-6)
    assert costs.samples == plain.samples


@pytest.mark.parametrize(
    "scheme", ["bsp", "lb-bsp", "bsp:engine=server", "lb-bsp:micro_batch=4", "local-sgd:period=1", "lb-bsp:multiple=2"]
)
def test_behind_a_barrier_workers_wait_for_costs_that_they_are_not_told(devices, run, scheme):
    cluster = devices(1, 1, 1, 1)
    blind = run(cluster, scheme, batch=64, iterations=60, costs=TEXTS, by_cost=False)
    assert blind.waiting_share > 0.15
    assert blind.samples == 64 * 60
    if scheme in ("bsp", "lb-bsp", "bsp:engine=server"):
        assert blind.seconds > 1.2 * run(cluster, scheme, batch=64, iterations=60, costs=TEXTS).seconds


def test_without_being_told_a_batch_takes_what_it_costs(devices, run):
    result, kept, _ = run(
        devices(1, 1), "bsp", batch=8, iterations=3, costs=[1.0, 3.0] * 12, by_cost=False, logged=True
    )
    seconds = [event.compute_seconds for events in iterations(kept) for event in events]
    assert sum(seconds) == pytest.approx(0.024)
    assert all(event.cost is None and event.samples == 4 for events in iterations(kept) for event in events)
    assert result.seconds == pytest.approx(sum(map(max, *(np.array_split(seconds, 2)))))


def test_claims_are_of_equal_cost(devices, run):
    _, kept, _ = run(devices(1, 1, 1), "asp", batch=48, iterations=100, costs=TEXTS, logged=True)
    costs = [event.cost for events in iterations(kept) for event in events]
    assert np.median(costs) == pytest.approx(16, abs=0.5)
    assert np.mean([abs(cost - 16) < 2 for cost in costs]) > 0.7


def test_behind_a_barrier_servers_take_about_the_time_of_no_servers(devices, run):
    cluster = devices(1, 1, 1, 1)
    without = run(cluster, "bsp", batch=64, iterations=100, costs=TEXTS, epoch_samples=64 * 20 + 9)
    served = run(cluster, "bsp:engine=server", batch=64, iterations=100, costs=TEXTS, epoch_samples=64 * 20 + 9)
    assert served.seconds == pytest.approx(without.seconds, rel=0.02)
    assert served.commits == without.commits


def test_micro_batches_are_cut_by_cost(devices, run):
    cluster = devices(1, 1, fixed_ms=5)
    _, kept, _ = run(cluster, "lb-bsp:micro_batch=4", batch=32, iterations=30, costs=Uniform(1, 3), logged=True)
    for events in iterations(kept):
        for event in events:
            # At least so many micro-batches of 4, each with the fixed time.
            assert event.compute_seconds >= (event.cost + 5 * int(event.cost / 4.8)) / 1000


def test_memory_counts_cost():
    device = (
        '[devices.d]\nper_sample = "1 ms"\nmemory = "2 GB"\nmemory_per_sample = "100 MB"\n[[workers]]\ndevice = "d"\n'
    )
    small = Scenario(
        cluster=parse_cluster(device), scheme=parse_scheme("asp"), global_batch_size=8, iterations=20, costs=TEXTS
    )
    assert simulate(small).complete
    with pytest.raises(ConfigError, match=r"was given 2\d samples of average cost but its device holds at most 20"):
        simulate(
            Scenario(
                cluster=parse_cluster(device),
                scheme=parse_scheme("bsp"),
                global_batch_size=18,
                iterations=50,
                costs=Uniform(1, 9),
            )
        )


@pytest.mark.parametrize("scheme", ["lb-bsp", "asp"])
def test_the_same_seed_gives_the_same_run_and_another_seed_another(devices, run, scheme):
    same = [run(devices(1, 2, seed=3), scheme, costs=TEXTS, logged=True) for _ in range(2)]
    assert [kept.events for kept in same[0][1]] == [kept.events for kept in same[1][1]]
    other = run(devices(1, 2, seed=4), scheme, costs=TEXTS)
    assert other.seconds != same[0][0].seconds


def test_each_epoch_has_an_order_of_its_own_of_the_same_samples(devices):
    lengths = [float(each) for each in range(1, 41)]
    scenario = Scenario(
        cluster=devices(1, 1),
        scheme=parse_scheme("bsp"),
        global_batch_size=8,
        iterations=10,
        epoch_samples=40,
        costs=lengths,
    )
    costs = scenario.sample_costs()
    orders = [costs.of_epoch(epoch).of(np.arange(40)).tolist() for epoch in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_distributions_are_what_they_say():
    drawn = np.log(draw_costs(LogNormal(0.5), 4000, 1))
    assert np.std(drawn) == pytest.approx(0.5, rel=0.05)
    assert np.mean(drawn) == pytest.approx(0.0, abs=0.03)
    uniform = draw_costs(Uniform(2.0, 4.0), 4000, 1)
    assert 2.0 < min(uniform) < 2.01 < 3.99 < max(uniform) < 4.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"costs": []}, "costs must be a distribution, or one number for each sample, not []"),
        ({"costs": ["long"]}, "costs must be a distribution, or one number for each sample"),
        ({"costs": [1.0, -2.0]}, "the cost of sample 1 is -2.0"),
        ({"costs": [float("nan")]}, "the cost of sample 0 is nan"),
        ({"costs": TEXTS, "scheme": "local-sgd"}, "leave out cost, or use another scheme"),
        ({"costs": TEXTS, "scheme": "lb-bsp:multiple=4"}, "multiple=4 rules most of them out"),
    ],
)
def test_costs_that_cannot_be_are_refused_in_one_sentence(devices, run, options, said):
    with pytest.raises(ConfigError) as caught:
        run(devices(1, 1), options.pop("scheme", "bsp"), **options)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: LogNormal(-1.0), "sigma must be a finite number greater than 0, not -1.0"),
        (lambda: LogNormal(9.0), "sigma must be at most 5, not 9.0"),
        (lambda: Uniform(0.0, 1.0), "least must be a finite number greater than 0"),
        (lambda: Uniform(3.0, 1.0), "most must be at least 3, not 1.0"),
    ],
)
def test_a_distribution_out_of_range_is_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
