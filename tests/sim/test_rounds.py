"""Federated training in virtual time."""

import math

import numpy as np
import pytest

from evenstep.cluster.slowness import Chain, Episodic, PerWorker
from evenstep.core.errors import ConfigError
from evenstep.sim import Client, FederatedScenario, simulate_rounds

SPEEDS = (1, 2, 4, 8)


def clients(speeds=SPEEDS, **given):
    return tuple(Client(**{"examples": 100, "seconds_per_sample": 0.08 / speed} | given) for speed in speeds)


def run(scheme="lb-bsp", nodes=None, **given):
    return simulate_rounds(FederatedScenario(clients=nodes or clients(), scheme=scheme, **given))


def test_plain_rounds_take_as_long_as_the_slowest_client():
    assert run("bsp").seconds == pytest.approx(10 * 10 * 32 * 0.08)


def test_balanced_rounds_take_the_mean_speed_from_the_second_one_on():
    done = run("lb-bsp")
    first, later = done.updates[0].seconds, np.diff([update.seconds for update in done.updates])
    assert first == pytest.approx(10 * 32 * 0.08)
    assert later == pytest.approx(first * 4 / sum(SPEEDS), rel=0.15)
    assert done.computed > 0.9 * (first + 9 * later.mean()) / done.seconds * 0.5


def test_adaptive_steps_take_as_long_and_change_the_steps():
    done = run("lb-bsp", mode="steps", steps=20)
    assert [work.steps for work in done.works] == [5, 11, 21, 43]
    assert {work.batch_size for work in done.works} == {32}


@pytest.mark.parametrize(
    "scheme", ["asp", "ssp:bound=2", "dssp:lower=1,upper=4", "bsp:engine=server", "grouped:groups=2"]
)
def test_without_rounds_as_much_work_is_in_the_model(scheme):
    done = run(scheme, rounds=12)
    assert sum(done.pieces) == 48
    assert done.updates[-1].progress == pytest.approx(12)
    if scheme == "asp":
        assert done.pieces[3] >= 6 * done.pieces[0]
    elif scheme == "ssp:bound=2":
        assert max(done.pieces) - min(done.pieces) <= 3


def test_a_buffer_makes_fewer_updates():
    assert len(run("asp", buffer=4).updates) == 10


def test_where_slowness_comes_and_goes_a_bound_beats_rounds():
    slow = Episodic(factor=8.0, period=10, shortest=1, longest=3, seed=3)
    given = {"nodes": clients((1,) * 8), "disturbance": slow, "rounds": 30}
    assert run("dssp:lower=3,upper=8", **given).seconds < 0.7 * run("lb-bsp", **given).seconds


def test_a_client_that_goes_away_costs_its_notice_without_patience_and_little_with_it():
    nodes = clients((4, 4, 4), away=())[:2] + clients((4,), away=((20.0, 60.0),))
    without, patient = run("lb-bsp", nodes), run("lb-bsp", nodes, patience=2.0)
    assert without.seconds > patient.seconds + 30
    assert patient.pieces[0] == 10
    assert 0 < patient.pieces[2] < 10
    done = run("ssp:bound=1", nodes, notice_seconds=5.0)
    assert done.updates[-1].progress == pytest.approx(10, abs=0.5)


def test_a_late_reply_counts_in_a_later_round_or_not_at_all():
    episodes = Episodic(factor=20.0, period=10, shortest=1, longest=1, seed=1)
    slow = PerWorker(parts_by_worker=(episodes, *[Chain()] * 3))
    given = {"nodes": clients((4,) * 4), "patience": 1.5, "disturbance": slow, "rounds": 60}
    kept, dropped = run(late="next", **given), run(late="drop", **given)
    assert any(update.stale > 0 for update in kept.updates)
    assert not any(update.stale > 0 for update in dropped.updates)
    assert kept.pieces[0] > dropped.pieces[0]


def test_links_count():
    assert run("bsp", clients(message_seconds=2.0)).seconds == pytest.approx(10 * (10 * 32 * 0.08 + 2.0))


def test_a_learner_gets_every_piece_that_is_in_the_model():
    class Noted:
        def __init__(self):
            self.begun, self.updated = [], []

        def begin(self, client, number, work):
            self.begun.append((client, number))

        def update(self, parts, now):
            self.updated += [(part.node, part.number) for part in parts]

    for scheme in ("lb-bsp", "ssp:bound=2"):
        noted = Noted()
        simulate_rounds(FederatedScenario(clients=clients(), scheme=scheme), noted)
        assert sorted(noted.updated) == sorted(noted.begun)
        assert len(set(noted.begun)) == 40


@pytest.mark.parametrize("scheme", ["lb-bsp", "dssp:lower=3,upper=15", "asp"])
def test_a_thousand_clients(scheme):
    generator = np.random.default_rng(0)
    speeds = generator.uniform(1, 8, size=1000)
    done = run(scheme, clients(speeds), rounds=5)
    assert done.updates[-1].progress == pytest.approx(5, abs=0.1)


def test_some_of_the_clients_are_in_a_round():
    done = run("lb-bsp", clients((1,) * 20), fraction=0.25, rounds=8)
    assert [update.replies for update in done.updates] == [5] * 8


@pytest.mark.parametrize(("given", "says"), [({"clients": ()}, "no client"), ({"fraction": 0.0}, "a fraction above 0")])
def test_what_cannot_work_is_refused(given, says):
    with pytest.raises(ConfigError, match=says):
        FederatedScenario(**({"clients": clients()} | given))


@pytest.mark.parametrize("scheme", ["local-sgd", "ssp:bound=3,load=lb-bsp"])
def test_a_scheme_of_which_a_part_would_be_ignored_is_refused(scheme):
    with pytest.raises(ConfigError, match="use lb-bsp or bsp for rounds"):
        run(scheme)


@pytest.mark.parametrize(
    "wrong",
    [{"rounds": 0}, {"batch_size": 0}, {"steps": 0}, {"steps": 2.5}, {"late": "never"}, {"notice_seconds": math.nan}],
)
@pytest.mark.parametrize("scheme", ["lb-bsp", "asp"])
def test_a_scenario_out_of_range_is_refused(wrong, scheme):
    with pytest.raises(ConfigError, match=r"must be a (whole|finite) number of at least|use next or drop"):
        FederatedScenario(clients=(Client(examples=1, seconds_per_sample=1.0),), scheme=scheme, **wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"examples": 0}, {"seconds_per_sample": -1.0}, {"fixed_seconds": math.nan}, {"message_seconds": math.inf}]
    + [{"away": away} for away in (((5.0, 4.0),), ((5.0, 9.0), (9.0, 12.0)), ((5.0, 9.0), (1.0, 2.0)), ((-1.0, 2.0),))],
)
def test_a_client_out_of_range_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"must be a (whole|finite) number of at least|give intervals"):
        Client(**({"examples": 1, "seconds_per_sample": 1.0} | wrong))


@pytest.mark.parametrize("scheme", ["lb-bsp", "ssp:bound=2", "asp"])
def test_clients_that_all_leave_for_good_end_the_simulation(scheme):
    gone = Client(examples=10, seconds_per_sample=0.01, away=((5.0, math.inf),))
    with pytest.raises(ConfigError, match="all clients leave for good"):
        simulate_rounds(FederatedScenario(clients=(gone, gone), scheme=scheme))
    stays = Client(examples=10, seconds_per_sample=0.01)
    assert simulate_rounds(FederatedScenario(clients=(gone, stays), scheme=scheme)).pieces[1] >= 10
