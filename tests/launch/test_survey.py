"""What follows from the measurements of a survey, and what is said of hosts that do not fit together."""

import pytest

from evenstep.cluster import parse_cluster
from evenstep.launch.survey import Survey, SurveyedWorker

VERSIONS = {"evenstep": "1.0", "python": "3.12.1", "torch": "2.13.0", "numpy": "2.4.0", "cuda": "none"}
POINTS = ((2, 0.02), (8, 0.02), (16, 0.03), (32, 0.06))


def worker(rank=0, host="a", **about):
    return SurveyedWorker(**{
        "worker": rank, "host": host, "device": "cpu", "processors": 4, "versions": VERSIONS, "unix_seconds": 1e9,
        "identity": f"{rank}", "memory_bytes": None, "holds": 32, "more": False, "points": POINTS, "size": 8,
        "seconds": (0.02, 0.04, 0.02), "outside_seconds": 0.001,
    } | about)  # fmt: skip


def survey(*workers, **about):
    return Survey(**{
        "workers": workers, "global_batch_size": 16, "largest_global_batch": 64, "by_cost": False,
        "iteration_seconds": 0.025, "gradient_bytes": 1000,
    } | about)  # fmt: skip


def test_hosts_that_fit_together_have_nothing_to_change():
    assert not list(survey(worker(), worker(1, "b")).warnings())


@pytest.mark.parametrize(
    ("workers", "told"),
    [
        (
            [worker(), worker(1, "b", versions=VERSIONS | {"torch": "2.12.0"}), worker(2, "c")],
            "torch is 2.13.0 on a, c and 2.12.0 on b",
        ),
        ([worker(rank, processors=2) for rank in range(3)], "3 workers on 2 processors"),
        ([worker(), worker(1, "b", unix_seconds=1e9 + 7)], "the clock of b is 7 s ahead of the clock of a"),
    ],
)
def test_each_thing_to_change_is_one_sentence(workers, told):
    (sentence,) = survey(*workers).warnings()
    assert told in sentence


def test_a_gpu_for_each_worker_needs_no_processor_for_each():
    assert not list(survey(*(worker(rank, device="GPU", processors=2) for rank in range(8))).warnings())


def test_a_worker_is_simulated_with_its_times_in_their_order():
    cluster = survey(worker(), worker(1, more=True)).cluster
    assert [cluster.largest_batch(0), cluster.largest_batch(1)] == [32, 2**31 - 1]
    seconds = [
        cluster.workers[0].disturbance().seconds(worker=0, iteration=at, batch_size=8, natural_seconds=0.0)
        for at in range(4)
    ]
    assert seconds == pytest.approx([0.02, 0.04, 0.02, 0.02])


def test_communication_is_what_the_slowest_worker_waits_for_besides_its_input():
    both = survey(worker(), worker(1, outside_seconds=0.003))
    # Of 25 ms the slowest computes 20 and spends 2 more than the other outside.
    assert both.exchange_seconds == pytest.approx(0.003)
    assert survey(worker(seconds=())).exchange_seconds == 0.0


def test_a_device_that_was_measured_at_one_size_takes_time_in_proportion():
    one = worker(points=((2, 0.02),))
    assert one.curve.seconds(8) == pytest.approx(0.08)
    assert one.full_from == 2


def test_the_cluster_file_describes_the_same_devices():
    both = survey(worker(), worker(1, more=True, device="GPU"))
    described = parse_cluster(both.cluster_file("measured"))
    assert described.gradient_bytes == 1000
    assert [each.device for each in described.workers] == [each.device for each in both.cluster.workers]


def test_what_is_written_is_read_again(tmp_path):
    one = survey(worker(), worker(1, memory_bytes=10))
    one.write(tmp_path / "run")
    assert Survey.read(tmp_path / "run") == one
    assert Survey.read(tmp_path) is None
    assert (one.holds_of("1"), one.holds_of("2"), one.together) == (32, None, 64)
    assert [each.full_from for each in one.workers] == [16, 16]
