"""Workers that are lent and taken away."""

import pytest

from evenstep.cluster import parse_cluster
from evenstep.core.errors import ConfigError

DEVICE = '[devices.d]\nper_sample = "10 ms"\n'
SCHEMES = ["bsp:engine=server", "ssp:bound=2", "dssp", "asp", "asp:exchange=overlapped", "ssp:bound=1,load=lb-bsp"]


def spots(*kinds, seed=1):
    """One worker for each text of a spot; an empty one stays."""
    text = f"seed = {seed}\n" + DEVICE
    for number, kind in enumerate(kinds):
        text += f"[spots.s{number}]\n{kind}\n" if kind else ""
    for number, kind in enumerate(kinds):
        text += '[[workers]]\ndevice = "d"\n' + (f'spot = "s{number}"\n' if kind else "")
    return parse_cluster(text)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_who_is_taken_away_takes_its_work_with_it_and_the_others_do_it(run, scheme):
    result, _, server = run(
        spots("", "", 'recorded = [["0 s", "2.05 s"]]'), scheme, batch=24, iterations=100, logged=True
    )
    gone = result.workers[2]
    assert gone.present_seconds == pytest.approx(2.05)
    assert gone.iterations <= 25
    assert result.complete
    assert result.samples == 2400
    assert result.seconds > 2400 * 0.010 / 3
    assert [(each.worker, each.at) for each in server.events if each.kind == "leave"] == [(2, 2.05)]
    # The others have done all the rest, what it had in hand when it went included.
    assert result.workers[0].samples + result.workers[1].samples == 2400 - gone.samples


@pytest.mark.parametrize("scheme", SCHEMES)
def test_who_comes_later_or_comes_back_takes_part(run, scheme):
    here = 'recorded = [["3 s", "5 s"], ["8 s", "100 s"]]'
    result, kept, server = run(spots("", "", here), scheme, batch=24, iterations=100, logged=True)
    late = result.workers[2]
    begins = [event for event in kept[2].events if event.kind == "run"]
    assert len(begins) == 2
    assert late.present_seconds == pytest.approx(result.seconds - 8 + 2)
    assert late.samples > 0
    assert result.samples == 2400
    joins = [(each.worker, each.at) for each in server.events if each.kind == "join"]
    assert joins == [(0, 0.0), (1, 0.0), (2, 3.0), (2, 8.0)]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_market_of_workers_finishes_each_epoch_exactly(run, scheme):
    cluster = spots(*['stays = "3 s"\naway = "1 s"'] * 6, seed=3)
    first = run(cluster, scheme, batch=48, iterations=120, epoch_samples=1000)
    assert first.complete
    assert first.samples >= 120 * 48 - 48
    assert first == run(cluster, scheme, batch=48, iterations=120, epoch_samples=1000)
    other = spots(*['stays = "3 s"\naway = "1 s"'] * 6, seed=4)
    assert first.seconds != run(other, scheme, batch=48, iterations=120, epoch_samples=1000).seconds
    assert all(each.present_seconds < first.seconds for each in first.workers)


@pytest.mark.parametrize("scheme", [*SCHEMES, "grouped:groups=0+2/1"])
def test_who_is_left_gets_no_more_than_its_memory_holds(run, scheme):
    small = DEVICE + 'memory = "45 MB"\nmemory_per_sample = "1 MB"\n'  # 42, since five per cent stay free
    cluster = parse_cluster(
        small + '[devices.large]\nper_sample = "10 ms"\nmemory = "1 GB"\nmemory_per_sample = "1 MB"\n'
        '[spots.s]\nrecorded = [["0 s", "2 s"], ["20 s", "100 s"]]\n'
        '[[workers]]\ndevice = "d"\n[[workers]]\ndevice = "large"\n[[workers]]\ndevice = "d"\nspot = "s"\n'
    )
    result, kept, _ = run(cluster, scheme, batch=96, iterations=40, logged=True)
    assert result.complete
    taken = [event.samples for event in kept[0].events if event.kind == "iteration"]
    assert max(taken) == 42


def test_a_run_that_all_leave_ends_there(run):
    result = run(spots('recorded = [["0 s", "2 s"]]', 'recorded = [["0 s", "3 s"]]'), "asp", batch=16, iterations=100)
    assert not result.complete
    assert result.seconds == 3.0
    assert 0 < result.samples < 1600


def test_a_run_without_a_moment_for_an_iteration_is_refused(run):
    with pytest.raises(ConfigError, match="longer stays"):
        run(spots('recorded = [["0 s", "0.01 s"]]'), "asp", batch=16)
    with pytest.raises(ConfigError, match="longer stays"):
        run(spots('stays = "1 us"\naway = "1 us"'), "asp", batch=16)


def test_a_scheme_without_servers_is_refused(run):
    with pytest.raises(ConfigError, match=r"worker 1 comes and goes.*bsp:engine=server"):
        run(spots("", 'stays = "1 s"'), "lb-bsp")
