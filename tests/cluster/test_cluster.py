"""The cluster file: what it may say, and what it is told when it says something else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenstep.cluster import Cluster, Host, Link, parse_cluster
from evenstep.cluster.slowness import (
    AffineCurve,
    Constant,
    Device,
    Episodic,
    From,
    Jitter,
    PointCurve,
    Trace,
)
from evenstep.cluster.slowness.draw import derive_seed
from evenstep.core.errors import ConfigError
from evenstep.core.values import UNLIMITED

FULL = """
seed = 7
[devices.fast]
fixed = "10 ms"
per_sample = "0.72 ms"
flat = 8
largest_batch = 169
[devices.old]
measured = "gtx750"
[devices.mine]
points = [[2, "30.5 ms"], [4, "46 ms"], [8, "0.1 s"]]
fit_from = 4
[links.lan]
bandwidth = "10 Gbit/s"
latency = "0.1 ms"
[links.wan]
bandwidth = "100Mbit/s"
[hosts.node7]
link = "lan"
[hosts.node8]
[[workers]]
device = "fast"
host = "node7"
count = 3
[[workers]]
device = "old"
disturb = ["busy", "late"]
[[workers]]
device = "mine"
host = "node8"
[[workers]]
disturb = ["slow", "noise", "recorded", "extra"]
[disturbances.busy]
kind = "episodic"
factor = 3
period = 200
shortest = 10
longest = 50
[disturbances.slow]
kind = "constant"
factor = 2.5
[disturbances.extra]
kind = "constant"
extra = "50 ms"
[disturbances.noise]
kind = "jitter"
spread = "5 %"
[disturbances.recorded]
kind = "trace"
factors = [1, 2.5]
[disturbances.late]
kind = "from"
factor = 4
first = 100
until = 200
"""
WORKER = "[[workers]]\n"


def seconds(cluster: Cluster, *, worker: int, iteration: int = 0, batch_size: int = 32) -> float:
    """The seconds of one iteration whose natural compute is one second."""
    return cluster.disturbance().seconds(worker=worker, iteration=iteration, batch_size=batch_size, natural_seconds=1.0)


def test_everything_a_file_may_say_is_read() -> None:
    cluster = parse_cluster(FULL)
    lan = Link(name="lan", bits_per_second=1e10, latency_seconds=0.0001)
    fast = Device(curve=AffineCurve(fixed_seconds=0.01, seconds_per_sample=0.00072, flat_size=8), largest_batch=169)
    mine = PointCurve(points=((2, 0.0305), (4, 0.046), (8, 0.1)), fit_from=4)
    assert len(cluster) == 6
    assert cluster.seed == 7
    assert cluster.links == (lan, Link(name="wan", bits_per_second=1e8))
    assert cluster.hosts == (Host(name="node7", link=lan), Host(name="node8"))
    assert [w.device for w in cluster.workers[:3]] == [fast] * 3
    assert [w.host for w in cluster.workers] == [cluster.hosts[0]] * 3 + [None, cluster.hosts[1], None]
    assert cluster.workers[3].device == Device(curve=PointCurve.measured("gtx750"))
    assert cluster.workers[3].disturbances == (
        Episodic(factor=3, period=200, shortest=10, longest=50, seed=derive_seed(7, "busy")),
        From(factor=4, first=100, until=200),
    )
    assert cluster.workers[4].device == Device(curve=mine)
    assert cluster.workers[5].disturbances == (
        Constant(factor=2.5),
        Jitter(spread=0.05, seed=derive_seed(7, "noise")),
        Trace(factors=(1, 2.5)),
        Constant(factor=1, extra_seconds=0.05),
    )


def test_the_shortest_file_is_workers_as_they_are() -> None:
    cluster = parse_cluster("[[workers]]\ncount = 4")
    assert len(cluster) == 4
    assert [seconds(cluster, worker=w) for w in range(4)] == [1.0] * 4
    assert cluster.largest_batch(3) == UNLIMITED


def test_memory_is_told_per_worker() -> None:
    assert [parse_cluster(FULL).largest_batch(w) for w in (0, 2, 3)] == [169, 169, UNLIMITED]


def test_a_worker_takes_its_device_s_time_and_then_its_disturbances_in_their_order() -> None:
    cluster = parse_cluster(FULL)
    episode = cluster.workers[3].disturbances[0]
    assert isinstance(episode, Episodic)
    factor = 3 if 150 in episode.episode(worker=3, number=0) else 1
    assert seconds(cluster, worker=0) == pytest.approx(0.01 + 32 * 0.00072)
    assert seconds(cluster, worker=3, iteration=150) == pytest.approx(0.1747197 * factor * 4)
    noise = cluster.workers[5].disturbances[1].seconds(worker=5, iteration=1, batch_size=1, natural_seconds=1.0)
    assert seconds(cluster, worker=5, iteration=1) == pytest.approx(2.5 * noise * 2.5 + 0.05)


def test_a_worker_beyond_the_last_is_refused() -> None:
    with pytest.raises(ConfigError, match="worker 6 is not described, only workers 0 to 5 are"):
        seconds(parse_cluster(FULL), worker=6)


def test_the_seed_moves_the_randomness_and_another_disturbance_does_not() -> None:
    def trace(text: str) -> list[float]:
        cluster = parse_cluster(text)
        return [seconds(cluster, worker=5, iteration=i) for i in range(20)]

    assert trace(FULL) == trace(FULL)
    assert trace(FULL) != trace(FULL.replace("seed = 7", "seed = 8"))
    assert trace(FULL) == trace(FULL + '[disturbances.another]\nkind = "jitter"\nspread = "9 %"\n')


def test_two_workers_of_one_table_have_noise_of_their_own() -> None:
    cluster = parse_cluster(
        '[disturbances.noise]\nkind = "jitter"\nspread = "5 %"\n[[workers]]\ncount = 2\ndisturb = ["noise"]'
    )
    assert seconds(cluster, worker=0) != seconds(cluster, worker=1)


DEVICE = WORKER + "[devices.d]\n"
LINK = WORKER + "[links.l]\n"
DISTURBANCE = WORKER + "[disturbances.b]\n"
EPISODIC = 'kind = "episodic"\nfactor = 2\n'
BAD_FILES = [
    ("[[workers", "cluster file: this is not valid TOML: "),
    ("", "cluster file: the key 'workers' is missing"),
    ("workers = []", "cluster file: workers must hold at least one table [[workers]]"),
    ("[workers]", "workers must be a list in square brackets, not {}"),
    ("workers = [1]", "[[workers]] number 1: this must be a table, not 1"),
    (WORKER + "[device.fast]", "there is no key 'device' here; did you mean 'devices'?"),
    (WORKER + "[zebra]", "there is no key 'zebra' here; choose one of 'seed', 'gradients', 'costs', 'devices', "),
    ('costs = "normal 1"\n' + WORKER, 'costs must be a distribution such as "lognormal 1.0" or "uniform 1 9", not '),
    ('costs = "lognormal"\n' + WORKER, 'costs must be a distribution such as "lognormal 1.0"'),
    ('costs = "lognormal much"\n' + WORKER, 'costs must be a distribution such as "lognormal 1.0"'),
    ("costs = 3\n" + WORKER, 'costs must be a distribution such as "lognormal 1.0"'),
    ('costs = "lognormal nan"\n' + WORKER, "costs 'lognormal nan': sigma must be a finite number greater than 0"),
    ('costs = "uniform 5 2"\n' + WORKER, "costs 'uniform 5 2': most must be at least 5, not 2.0"),
    ("seed = 0.5\n" + WORKER, "seed must be a whole number of at least 0, not 0.5"),
    ("seed = -1\n" + WORKER, "seed must be a whole number of at least 0, not -1"),
    ("seed = 99999999999999999999\n" + WORKER, "seed must be a whole number of at most 18446744073709551615"),
    ("seed = " + "9" * 5000, "cluster file: this is not valid TOML: "),
    ("devices = 3\n" + WORKER, "[devices]: this must be a table, not 3"),
    ("devices.fast = 3\n" + WORKER, "[devices.fast]: this must be a table, not 3"),
    # Workers
    (WORKER * 2 + 'devices = "x"', "[[workers]] number 2: there is no key 'devices' here; did you mean 'device'?"),
    (WORKER + 'device = "x"\n[devices.a]\nper_sample = "1 s"', "1: device 'x' is unknown; choose one of 'a'"),
    (WORKER + 'device = "fast"', "[[workers]] number 1: device 'fast' is unknown; none is defined"),
    (WORKER + "device = 3", "device must be a name in quotes, not 3"),
    (WORKER + 'host = "node7"\n[hosts.node8]', "host 'node7' is unknown; did you mean 'node8'?"),
    (WORKER + 'disturb = "busy"', "disturb must be a list in square brackets, not 'busy'"),
    (WORKER + 'disturb = ["busi"]\n[disturbances.busy]\nkind = "trace"\nfactors = [1]', "did you mean 'busy'?"),
    (WORKER + "disturb = [1]", "disturb[0] must be a name in quotes, not 1"),
    (WORKER + "device = " + "[" * 100_000 + "]" * 100_000, "cluster file: this is nested too deeply"),
    (WORKER + "device = " + "[" * 60 + "]" * 60, "device must be a name in quotes, not [list]"),
    (WORKER + 'device = "' + "x" * 100_000 + '"', "device 'xxxxxxxx"),
    (WORKER + "count = 0", "count must be a whole number of at least 1, not 0"),
    (WORKER + "count = true", "count must be a whole number of at least 1, not True"),
    (WORKER + 'count = "3"', "count must be a whole number of at least 1, not '3'"),
    (WORKER * 2 + "count = 1000000", "number 2: count must keep the cluster within 1000000 workers, not 1000000"),
    # Devices
    (DEVICE, "[devices.d]: a device needs exactly one of 'per_sample', 'measured' and 'points', and there is none"),
    (DEVICE + 'measured = "gtx750"\nper_sample = "1 ms"', "and there is 'per_sample' and 'measured'"),
    (DEVICE + 'measured = "gtx570"', "measured 'gtx570' is unknown; did you mean 'gtx750'?"),
    (DEVICE + 'measured = "gtx750"\nflat = 8', "the key 'flat' does not go with 'measured'; remove one of them"),
    (DEVICE + 'per_sample = "1 ms"\nfit_from = 8', "the key 'fit_from' does not go with 'per_sample'"),
    (DEVICE + 'per_sampel = "1 ms"', "there is no key 'per_sampel' here; did you mean 'per_sample'?"),
    (DEVICE + "per_sample = 0.001", 'per_sample must be a duration such as "10 ms" (units: s, ms, us), not 0.001'),
    (DEVICE + 'per_sample = "1 min"', "(units: s, ms, us), not '1 min'"),
    (DEVICE + 'per_sample = "-1 ms"', "(units: s, ms, us), not '-1 ms'"),
    (DEVICE + f'per_sample = "{"9" * 400} ms"', 'per_sample must be a duration such as "10 ms"'),
    (DEVICE + 'per_sample = "0 ms"', "[devices.d]: the fixed part and the time per sample must not both be 0"),
    (DEVICE + 'per_sample = "1 ms"\nflat = 1.5', "flat must be a whole number of at least 0, not 1.5"),
    (DEVICE + 'per_sample = "1 ms"\nlargest_batch = 0', "largest_batch must be a whole number of at least 1, not 0"),
    (
        DEVICE + 'per_sample = "1 ms"\nlargest_batch = 2147483648',
        "largest_batch must be a whole number of at most 2147483647",
    ),
    (DEVICE + 'points = "x"', "points must be a list in square brackets, not 'x'"),
    (DEVICE + "points = [3]", 'points[0] must be a pair such as [16, "30.5 ms"], not 3'),
    (DEVICE + "points = [[3]]", 'points[0] must be a pair such as [16, "30.5 ms"], not [3]'),
    (DEVICE + 'points = [[2.5, "1 ms"]]', "points[0][0] must be a whole number of at least 1, not 2.5"),
    (DEVICE + "points = [[2, 1]]", 'points[0][1] must be a duration such as "10 ms"'),
    (DEVICE + 'points = [[2, "1 ms"]]', "[devices.d]: points must hold at least two points, not 1"),
    (DEVICE + 'points = [[4, "1 ms"], [2, "2 ms"]]', "points must be in rising order of batch size, not 2 after 4"),
    (DEVICE + 'per_sample = "1 ms"\nmemory = "1 GB"', "[devices.d]: the key 'memory_per_sample' is missing"),
    (DEVICE + 'per_sample = "1 ms"\nmemory = "1 KB"\nmemory_per_sample = "1 MB"', "holds no sample: raise memory"),
    # Links and hosts
    (LINK, "[links.l]: the key 'bandwidth' is missing"),
    (LINK + 'bandwidth = "10 Gb/s"', "\"10 Gbit/s\" (units: Gbit/s, Mbit/s), not '10 Gb/s'"),
    (LINK + 'bandwidth = "0 Gbit/s"', "[links.l]: bandwidth must be a finite number greater than 0, not 0.0"),
    (LINK + 'bandwidth = "1 Gbit/s"\nlatency = 1', 'latency must be a duration such as "10 ms"'),
    (LINK + 'bandwith = "1 Gbit/s"', "there is no key 'bandwith' here; did you mean 'bandwidth'?"),
    (WORKER + '[hosts.h]\nlink = "lan"', "[hosts.h]: link 'lan' is unknown; none is defined"),
    (WORKER + '[hosts.h]\nlnk = "lan"', "[hosts.h]: there is no key 'lnk' here; did you mean 'link'?"),
    # Disturbances
    (DISTURBANCE, "[disturbances.b]: the key 'kind' is missing"),
    (DISTURBANCE + "kind = 1", "kind must be a name in quotes, not 1"),
    (DISTURBANCE + 'kind = "episode"', "kind 'episode' is unknown; did you mean 'episodic'?"),
    (DISTURBANCE + 'kind = "constant"', "a constant disturbance needs 'factor', 'extra' or both"),
    (DISTURBANCE + 'kind = "constant"\nfactor = 0.5', "[disturbances.b]: factor must be a finite number of at least 1"),
    (DISTURBANCE + 'kind = "constant"\nfactor = nan', "factor must be a finite number of at least 1, not nan"),
    (DISTURBANCE + f'kind = "constant"\nfactor = {"9" * 400}', "factor must be a finite number of at most 1000000000"),
    (DISTURBANCE + EPISODIC + f"period = {'9' * 400}", "period must be a whole number of at most 1000000000"),
    (DISTURBANCE + 'kind = "constant"\nfactor = "4x"', "factor must be a finite number of at least 1, not '4x'"),
    (DISTURBANCE + 'kind = "constant"\nfactor = true', "factor must be a finite number of at least 1, not True"),
    (DISTURBANCE + 'kind = "constant"\nextra = "1 h"', 'extra must be a duration such as "10 ms"'),
    (
        DISTURBANCE + 'kind = "constant"\nperiod = 3',
        "there is no key 'period' here; choose one of 'kind', 'takes', 'factor'",
    ),
    (DISTURBANCE + EPISODIC + "perod = 9", "there is no key 'perod' here; did you mean 'period'?"),
    (DISTURBANCE + EPISODIC + "period = 9\nlongest = 2", "the key 'shortest' is missing"),
    (DISTURBANCE + EPISODIC + "period = 9\nshortest = 3\nlongest = 2", "[disturbances.b]: longest must lie between"),
    (DISTURBANCE + 'kind = "from"\nfactor = 2', "the key 'first' is missing"),
    (DISTURBANCE + 'kind = "from"\nfactor = 2\nfirst = 5\nuntil = 5', "until must be greater than first, which is 5"),
    (DISTURBANCE + 'kind = "jitter"\nspread = 0.05', 'spread must be a share such as "5 %" (units: %), not 0.05'),
    (DISTURBANCE + 'kind = "jitter"\nspread = "5 ms"', "(units: %), not '5 ms'"),
    (DISTURBANCE + 'kind = "trace"\nfactors = 2', "factors must be a list in square brackets, not 2"),
    (DISTURBANCE + 'kind = "trace"\nfactors = []', "factors must hold at least one number"),
    (DISTURBANCE + 'kind = "trace"\nfactors = ["2"]', "factors[0] must be a finite number greater than 0, not '2'"),
    (DISTURBANCE + 'kind = "trace"\nfactors = [0]', "factors[0] must be a finite number greater than 0, not 0"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES, ids=range(len(BAD_FILES)))
def test_a_wrong_file_is_refused_with_the_place_and_the_value(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_cluster(text)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300


def test_the_file_is_called_what_the_caller_calls_it() -> None:
    with pytest.raises(ConfigError, match=r"^slow\.toml: the key 'workers' is missing$"):
        parse_cluster("", name="slow.toml")


@settings(derandomize=True, max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    lines = FULL.splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    damages = ["", "x = 1", 'kind = ""', "count = [[]]", "[[workers]]", lines[-at], "[links]"]
    lines[at] = data.draw(st.sampled_from(damages))
    try:
        cluster = parse_cluster("\n".join(lines))
    except ConfigError:
        return
    assert len(cluster) >= 1
