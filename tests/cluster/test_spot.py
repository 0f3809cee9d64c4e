"""When workers that are lent are there."""

from itertools import islice, pairwise
from statistics import mean

import pytest

from evenstep.cluster import DrawnSpot, Host, Link, RecordedSpot, Stay, parse_cluster
from evenstep.cluster.slowness.draw import derive_seed
from evenstep.core.errors import ConfigError

TEXT = """
seed = 3
[spots.market]
stays = "100 s"
away = "20 s"
[spots.lost]
stays = "100 s"
[spots.seen]
recorded = [["0 s", "90 s"], ["120 s", "400 s"]]
[links.lan]
bandwidth = "1 Gbit/s"
[hosts.h]
link = "lan"
[[servers]]
host = "h"
count = 2
[[workers]]
spot = "market"
link = "lan"
count = 2
[[workers]]
spot = "lost"
[[workers]]
spot = "seen"
[[workers]]
"""


def test_spots_servers_and_own_links_are_read() -> None:
    cluster = parse_cluster(TEXT)
    seed = derive_seed(3, "market")
    assert cluster.workers[0].spot == DrawnSpot(stays_seconds=100, away_seconds=20, seed=seed)
    assert cluster.workers[2].spot == DrawnSpot(stays_seconds=100, seed=derive_seed(3, "lost"))
    assert cluster.workers[3].spot == RecordedSpot(recorded=(Stay(begins=0, ends=90), Stay(begins=120, ends=400)))
    assert cluster.workers[4].spot is None
    assert cluster.workers[1].link == Link(name="lan", bits_per_second=1e9)
    assert cluster.servers == (Host(name="h", link=cluster.links[0]),) * 2


def test_drawn_stays_are_in_order_and_of_the_length_that_was_asked_for() -> None:
    spot = DrawnSpot(stays_seconds=100, away_seconds=20, seed=1)
    stays = list(islice(spot.stays(0), 3_000))
    assert stays[0].begins == 0.0
    assert all(before.ends < after.begins < after.ends for before, after in pairwise(stays))
    assert mean(stay.ends - stay.begins for stay in stays) == pytest.approx(100, rel=0.05)
    absences = [after.begins - before.ends for before, after in pairwise(stays)]
    assert mean(absences) == pytest.approx(20, rel=0.05)
    assert list(islice(spot.stays(0), 10)) == stays[:10]
    assert list(islice(spot.stays(1), 10)) != stays[:10]
    assert next(DrawnSpot(stays_seconds=100, away_seconds=20, seed=2).stays(0)) != stays[0]


def test_who_has_no_absence_does_not_come_back() -> None:
    assert len(list(DrawnSpot(stays_seconds=100, seed=1).stays(4))) == 1


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("[spots.s]", "'stays' is missing"),
        ('[spots.s]\nstays = "0 s"', "stays must be a finite number greater than 0"),
        ('[spots.s]\nstays = "1 s"\naway = "0 s"', "away must be"),
        ('[spots.s]\nstays = "1 s"\nrecorded = []', "'recorded' does not go with"),
        ("[spots.s]\nrecorded = []", "at least one stay"),
        ('[spots.s]\nrecorded = [["1 s"]]', r"recorded\[0\] must be a pair"),
        ('[spots.s]\nrecorded = [["2 s", "1 s"]]', "must end after it began"),
        ('[spots.s]\nrecorded = [["0 s", "1 s"], ["1 s", "2 s"]]', "after the one before it ended"),
        ('[[workers]]\nspot = "none"', "spot 'none' is unknown"),
        ('[[servers]]\nhost = "none"', "host 'none' is unknown"),
        ('[links.l]\nbandwidth = "1 Gbit/s"\n[hosts.h]\n[[workers]]\nhost = "h"\nlink = "l"', "that shares no host"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place(text: str, fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        parse_cluster(text + "\n[[workers]]")
