"""Runs as wholes: the same for the same seed, every sample once, the log that a report reads."""

import tracemalloc

import pytest
from msgspec.json import encode

from evenstep.cluster import parse_cluster
from evenstep.core.errors import ConfigError
from evenstep.report.recorded import read_run, recorded_run
from evenstep.report.summary import summary_of
from evenstep.schemes import parse_scheme
from evenstep.sim import Log, Scenario, simulate
from evenstep.telemetry import JsonlRecorder, Silent

SCHEMES = [
    "bsp",
    "bsp:micro_batch=4",
    "lb-bsp",
    "lb-bsp:predictor=ema",
    "lb-bsp:predictor=narx",
    "lb-bsp:exchange=blocking,multiple=2",
    "lb-bsp:tuner=pairwise",
    "lb-bsp:micro_batch=4",
    "dbs",
    "local-sgd:period=3",
    "local-sgd:period=3,load=lb-bsp",
    "asp",
    "asp:load=lb-bsp:predictor=ema",
    "asp:exchange=overlapped",
    "ssp:bound=2",
    "ssp:bound=2,exchange=overlapped,load=dbs",
    "ssp:servers=3",
    "dssp:lower=1,upper=4",
    "dssp:bounded=false",
    "bsp:engine=server",
    "bsp:engine=server,load=lb-bsp",
]
NETWORK = """
[links.lan]
bandwidth = "1 Gbit/s"
latency = "1 ms"
[hosts.h]
link = "lan"
[[servers]]
host = "h"
[disturbances.noise]
kind = "jitter"
spread = "20 %"
[disturbances.spell]
kind = "episodic"
factor = 3
period = 20
shortest = 2
longest = 8
"""


@pytest.fixture
def busy(devices):
    """Four unlike workers with noise, spells and a network."""
    return lambda seed=5: devices(
        1, 2, 3, 6, fixed_ms=2, more=NETWORK, disturb='"noise", "spell"', worker='link = "lan"', seed=seed
    )


def events_of(run, cluster, scheme, **more):
    result, kept, server = run(
        cluster, scheme, batch=64, iterations=25, epoch_samples=643, message_bytes=100_000, logged=True, **more
    )
    return result, [each.events for each in kept], getattr(server, "events", [])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(run, busy, scheme):
    first, *events = events_of(run, busy(), scheme)
    again, *same = events_of(run, busy(), scheme)
    other, *others = events_of(run, busy(seed=6), scheme)
    assert first == again
    assert encode(events) == encode(same)
    assert first.seconds != other.seconds
    assert encode(events) != encode(others)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_log_changes_nothing_and_adds_up_to_the_summary(run, busy, scheme):
    logged, events, served = events_of(run, busy(), scheme)
    plain = run(busy(), scheme, batch=64, iterations=25, epoch_samples=643, message_bytes=100_000)
    assert plain == logged
    samples = [
        sum(event.samples for event in worker if event.kind == "iteration" and event.worker == number)
        for number, worker in enumerate(events)
    ]
    # What is still on its way when the last sample is committed is in no event.
    assert sum(samples) <= sum(each.samples for each in plain.workers) <= sum(samples) + 64
    recorded = recorded_run((event for worker in events for event in worker), served)
    summary = summary_of(recorded)
    assert summary.scheme == scheme or parse_scheme(scheme).name == summary.scheme
    if recorded.servers is None:
        assert summary.samples_per_second == pytest.approx(plain.samples_per_second, rel=1e-6)
        waited = sum(each.waiting_share for each in summary.workers) / 4
        assert waited == pytest.approx(plain.waiting_share, abs=1e-3)
    else:
        assert recorded.servers.commits == plain.commits
        assert recorded.servers.samples_committed == plain.samples


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_epoch_has_each_of_its_samples_once(run, busy, scheme):
    result, events, _ = events_of(run, busy(), scheme)
    by_epoch = {}
    for worker in events:
        for event in worker:
            if event.kind == "iteration":
                by_epoch[event.epoch] = by_epoch.get(event.epoch, 0) + event.samples
    # 11 slices an epoch, the last of 3 samples: two epochs, and three slices of the next.
    assert by_epoch[0] == by_epoch[1] == 643
    assert result.samples >= 2 * 643 + 3 * 64
    assert result.complete


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_of_an_iteration_make_it_up(run, busy, scheme):
    _, events, _ = events_of(run, busy(), scheme)
    for worker in events:
        for event in worker:
            if event.kind != "iteration" or "overlapped" in scheme:
                continue
            parts = [getattr(event, f"{part}_seconds") for part in ("input", "compute", "wait", "comm")]
            assert all(part >= -1e-9 for part in parts)
            assert sum(parts) == pytest.approx(event.iteration_seconds, abs=2e-5)


def test_lead_and_staleness_stay_within_the_bounds_that_follow_from_each_other(run, busy):
    result = run(busy(), "ssp:bound=2", batch=64, iterations=200, message_bytes=100_000)
    assert result.largest_lead == 2
    assert 0 < result.mean_staleness <= result.largest_staleness
    assert run(busy(), "bsp:engine=server", batch=64, message_bytes=0).largest_staleness == 0


def test_the_users_own_sizes_are_kept(run, devices):
    result = run(devices(1, 2, 4), "static:40/20/10", batch=70, iterations=10)
    assert result.seconds == pytest.approx(10 * 0.040)
    assert [each.last_batch_size for each in result.workers] == [40, 20, 10]


def test_the_files_of_a_log_are_those_of_a_run(tmp_path, busy):
    scenario = Scenario(
        cluster=busy(), scheme=parse_scheme("ssp"), global_batch_size=64, iterations=20, message_bytes=0
    )
    workers = [JsonlRecorder(tmp_path, worker) for worker in range(4)]
    log = Log(workers=workers, server=JsonlRecorder(tmp_path, 0, role="server"))
    result = simulate(scenario, log=log)
    log.close()
    read = read_run(tmp_path)
    assert read.workers == [0, 1, 2, 3]
    assert summary_of(read).served.samples_committed == result.samples


def test_memory_of_a_device_is_learnt_as_in_a_real_run(run, devices):
    more = '[devices.small]\nper_sample = "1 ms"\nmemory = "100 MB"\nmemory_per_sample = "5 MB"\n'
    more += '[[workers]]\ndevice = "small"\n'
    result = run(devices(4, 4, more=more), "lb-bsp", batch=48, iterations=60)
    assert result.workers[2].last_batch_size <= 20 - 1  # five per cent stay free
    assert result.workers[2].last_batch_size > 16


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"iterations": 0}, "iterations must be a whole number of at least 1, not 0"),
        ({"global_batch_size": 3}, "is less than 4 workers"),
        ({"exchange_seconds": -1.0}, "exchange_seconds must be a finite number of at least 0"),
        ({"all_reduce": "star"}, "use ring or tree"),
        ({"message_bytes": None}, "say how large the gradients are"),
        ({"message_bytes": -1}, "message_bytes must be a whole number of at least 0, not -1"),
        ({"ahead": -1}, "ahead must be a whole number of at least 0"),
        ({"epoch_samples": 0}, "epoch_samples must be a whole number of at least 1, not 0"),
        ({"global_batch_size": 10**30}, "at most"),
        ({"iterations": 2.5}, "iterations must be a whole number of at least 1, not 2.5"),
        ({"message_bytes": float("nan")}, "message_bytes must be a whole number of at least 0, not nan"),
        ({"scheme": parse_scheme("static:32/16/8/9")}, "add up to 65, not to the global batch size 64: correct one of"),
        (
            {"scheme": parse_scheme("static:32/16/16")},
            "there are sizes for 3 workers, and the run has 4: give one for each",
        ),
        ({"scheme": parse_scheme("static:host:a=16")}, "hosts and GPUs of the 4 workers are not known: give sizes by"),
        ({"scheme": "ssp:bound=3"}, r"give parse_scheme\('ssp:bound=3'\)"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_sentence(busy, change, fragment):
    known = {"global_batch_size": 64, "iterations": 5, "message_bytes": 0}
    with pytest.raises(ConfigError, match=fragment):
        Scenario(**{"cluster": busy(), "scheme": parse_scheme("bsp"), **known, **change})


@pytest.mark.parametrize("scheme", ["bsp", "lb-bsp", "asp"])
@pytest.mark.parametrize("seconds", ["1" + "0" * 24, "1" + "0" * 307])
def test_times_beyond_all_numbers_are_refused(run, scheme, seconds):
    cluster = parse_cluster(f'[devices.d]\nper_sample = "{seconds} s"\n[[workers]]\ndevice = "d"\ncount = 2')
    if scheme != "lb-bsp" and len(seconds) == 25:  # Which need no report of it.
        assert run(cluster, scheme).samples_per_second == pytest.approx(1e-24 * 2)
        return
    with pytest.raises(ConfigError, match="simulated time overflows a float"):
        run(cluster, scheme)


def test_a_worker_without_a_device_is_told_what_it_lacks(run, devices):
    with pytest.raises(ConfigError, match=r"worker 1 has no device.*add device"):
        run(devices(1, more="[[workers]]"), "bsp")


def test_a_batch_that_the_device_does_not_hold_is_refused(run, devices):
    cluster = devices(
        1, more='[devices.s]\nper_sample="1 ms"\nmemory="10 MB"\nmemory_per_sample="1 MB"\n[[workers]]\ndevice="s"'
    )
    with pytest.raises(ConfigError, match="worker 1 was given 16 samples but its device holds at most 10"):
        run(cluster, "bsp")


def test_a_silent_server_is_fine_for_schemes_without(run, devices):
    scenario = Scenario(cluster=devices(1), scheme=parse_scheme("bsp"), global_batch_size=4, iterations=2)
    assert simulate(scenario, log=Log(workers=[Silent()], server=Silent())).samples == 8


@pytest.mark.parametrize("scheme", ["lb-bsp:predictor=ema", "local-sgd", "dssp:load=lb-bsp"])
def test_memory_does_not_grow_with_the_run(run, busy, scheme):
    def peak(iterations):
        tracemalloc.start()
        run(busy(), scheme, batch=64, iterations=iterations, epoch_samples=6_400, message_bytes=1_000)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(100)  # What is made once and for all.
    # What the garbage collector has not come to yet is not what is kept: a log would take 0.7 MB more.
    assert peak(700) < peak(100) + 250_000


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_short_last_slice_can_be_left_out(run, busy, scheme):
    result = run(busy(), scheme, batch=64, iterations=20, epoch_samples=643, drop_last=True, message_bytes=0)
    assert result.complete
    assert result.samples == 20 * 64


@pytest.mark.parametrize("scheme", ["bsp", "lb-bsp", "asp", "bsp:engine=server"])
def test_nobody_computes_on_fewer_than_the_smallest_batch(run, devices, scheme):
    _, kept, _ = run(devices(1, 1, 2), scheme, batch=12, iterations=9, epoch_samples=29, logged=True)
    events = [event for each in kept for event in each.events if event.kind == "iteration"]
    assert sum(event.samples for event in events) == 3 * 29
    assert min(event.row[0] for event in events) >= 2  # copies count as computed on, not as samples


@pytest.mark.parametrize("exchange", ["blocking", "overlapped"])
def test_claims_held_ahead_change_nothing_but_the_end_of_an_epoch(run, devices, exchange):
    cluster = devices(1, 2, 4)
    ahead, without = (
        run(cluster, f"ssp:bound=2,exchange={exchange}", iterations=400, ahead=each, exchange_seconds=0.004)
        for each in (2, 1)
    )
    assert ahead.samples == without.samples == 400 * 48
    assert ahead.samples_per_second == pytest.approx(without.samples_per_second, rel=0.02)


def test_an_exchange_that_overlaps_with_compute_is_not_waited_for(run, devices):
    cluster = devices(1, 1)
    blocking, overlapped = (
        run(cluster, f"asp:exchange={each}", iterations=200, exchange_seconds=0.008)
        for each in ("blocking", "overlapped")
    )
    assert blocking.samples_per_second == pytest.approx(32 / 0.024, rel=0.01)
    assert overlapped.samples_per_second == pytest.approx(32 / 0.016, rel=0.01)
    # On weights that lack one more of its own pushes, and so one more of the other's.
    assert overlapped.mean_staleness > blocking.mean_staleness + 0.9


def test_pushes_share_the_link_of_a_server(run):
    text = """
    [links.lan]
    bandwidth = "80 Mbit/s"
    [hosts.h]
    link = "lan"
    [devices.d]
    per_sample = "1 us"
    [[servers]]
    host = "h"
    [[workers]]
    device = "d"
    count = 8
    """
    result = run(parse_cluster(text), "asp", batch=80, iterations=100, message_bytes=100_000)
    # 100 KB take 10 ms in each direction, whichever of the eight they are for.
    assert result.commits_per_second == pytest.approx(100, rel=0.02)
    assert result.communication_share > 0.97


LINKED = """
[links.lan]
bandwidth = "80 Mbit/s"
[devices.d]
per_sample = "1 ms"
[[workers]]
device = "d"
link = "lan"
count = 2
"""


@pytest.mark.parametrize("scheme", ["asp", "asp:exchange=overlapped", "bsp:engine=server"])
def test_a_push_that_the_end_of_the_run_cuts_off_is_no_waiting(run, scheme):
    # 1 MB take 100 ms, once in each direction, and for the first weights; a batch of 16 takes 16 ms.
    result = run(parse_cluster(LINKED), scheme, batch=32, iterations=4, epoch_samples=3200, message_bytes=1_000_000)
    for each in result.workers:
        assert each.wait_seconds == pytest.approx(0.0, abs=1e-9)
        assert each.idle_seconds == pytest.approx(0.1)


def test_weights_that_a_worker_has_are_not_sent_again(run):
    # Two epochs of two iterations: the first weights, and four times compute, a push and the new weights.
    result = run(
        parse_cluster(LINKED), "bsp:engine=server", batch=32, iterations=4, epoch_samples=64, message_bytes=1_000_000
    )
    assert result.seconds == pytest.approx(0.1 + 4 * (0.016 + 0.1 + 0.1) - 0.1)


def test_who_is_held_at_the_end_of_the_run_has_waited_since_its_push_arrived(run, devices):
    result = run(devices(1, 4), "bsp:engine=server", batch=32, iterations=1, exchange_seconds=0.005)
    assert [each.wait_seconds for each in result.workers] == pytest.approx([0.048, 0.0])


@pytest.mark.parametrize("scheme", ["asp:", "ssp:bound=1,", "dssp:"])
def test_overlapped_exchanges_lose_no_time_at_the_end_of_an_epoch(run, busy, scheme):
    # In epochs of two global batches nobody has anything to compute on while its last push is under way.
    result = run(busy(), f"{scheme}exchange=overlapped", batch=64, epoch_samples=128, message_bytes=1_000_000)
    for each in result.workers:
        told = each.compute_seconds + each.wait_seconds + each.comm_seconds + each.idle_seconds
        # All but what the end of the run has cut off.
        assert 0.0 <= each.present_seconds - told + 1e-9 < 0.01 * each.present_seconds
