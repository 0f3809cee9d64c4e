"""Disturbances that a worker can see in its driving factors."""

import pytest

from evenstep import Balancer
from evenstep.cli.main import main
from evenstep.cluster import parse_cluster
from evenstep.cluster.slowness import factors_of
from evenstep.core.errors import ConfigError
from evenstep.core.values import Factors
from evenstep.schemes import parse_scheme
from evenstep.sim import Scenario, simulate
from evenstep.telemetry import read_events
from evenstep.telemetry.events import IterationDone

SEEN = """
[devices.cpu]
per_sample = "{per_sample}"
[disturbances.others]
kind = "trace"
factors = [1, 1, 4, 4, 4]
takes = "processor"
[disturbances.cache]
kind = "from"
factor = 2
first = 3
takes = "memory"
[disturbances.unseen]
kind = "constant"
factor = 8
[[workers]]
device = "cpu"
disturb = ["others", "cache", "unseen"]
count = {count}
"""


def seen(count=1, per_sample="1 ms"):
    return parse_cluster(SEEN.format(count=count, per_sample=per_sample))


def test_the_share_that_is_left_falls_with_the_first_iteration_that_is_slowed():
    disturbance = seen(2).disturbance()
    shares = [factors_of(disturbance, worker=1, iteration=iteration) for iteration in range(6)]
    assert [each.cpu_availability for each in shares] == [1, 1, 0.25, 0.25, 0.25, 1]
    assert [each.memory_availability for each in shares] == [1, 1, 1, 0.5, 0.5, 0.5]


def test_what_is_taken_slows_as_it_would_unseen():
    times = [
        seen().disturbance().seconds(worker=0, iteration=iteration, batch_size=10, natural_seconds=0.0)
        for iteration in (0, 2, 3)
    ]
    assert times == pytest.approx([0.08, 0.32, 0.64])


def test_something_else_to_take_is_refused():
    text = SEEN.format(count=1, per_sample="1 ms").replace('"memory"', '"disk"')
    with pytest.raises(ConfigError, match=r"\[disturbances.cache\].*takes.*disk.*memory"):
        parse_cluster(text)


def test_an_emulated_worker_reads_what_a_simulated_one_reads(tmp_path, monkeypatch):
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(SEEN.format(count=1, per_sample="1 us"))
    scheme = "lb-bsp:predictor=narx"
    monkeypatch.setenv("EVENSTEP_EMULATE", str(cluster))
    balancer = Balancer(
        scheme, rank=0, workers=1, all_gather=lambda row: [row], length=60, global_batch_size=10,
        run_dir=tmp_path / "real",
    )  # fmt: skip
    for _ in balancer.epoch(0):
        with balancer.compute():
            pass
    simulated = ["simulate", str(cluster), "--schemes", scheme, "--global-batch-size", "10", "--iterations", "6"]
    assert main([*simulated, "--run-dir", str(tmp_path / "simulated")]) == 0
    real, virtual = (
        [
            event.factors
            for event in read_events(next(folder.rglob("worker-0.jsonl")).parent)
            if isinstance(event, IterationDone)
        ]
        for folder in (tmp_path / "real", tmp_path / "simulated")
    )
    assert [tuple(each) for each in real] == [(1, 1), (1, 1), (0.25, 1), (0.25, 0.5), (0.25, 0.5), (1, 0.5)]
    assert virtual == real


def test_a_predictor_that_sees_others_come_is_faster():
    """Short episodes: a predictor without driving factors is late for each."""
    text = """
    [devices.cpu]
    per_sample = "1 ms"
    [disturbances.others]
    kind = "episodic"
    factor = 3
    period = 20
    shortest = 2
    longest = 6
    {takes}
    [[workers]]
    device = "cpu"
    disturb = ["others"]
    count = 3
    """

    def speed(takes):
        scheme = parse_scheme("lb-bsp:predictor=narx")
        cluster = parse_cluster(text.format(takes=takes))
        return simulate(
            Scenario(cluster=cluster, scheme=scheme, global_batch_size=300, iterations=1000)
        ).samples_per_second

    assert speed('takes = "processor"') > 1.2 * speed("")


def test_without_anything_seen_the_factors_are_one():
    assert factors_of(parse_cluster("[[workers]]\ncount = 1").disturbance(), worker=0, iteration=0) == Factors()
