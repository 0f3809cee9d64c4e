"""What arithmetic alone says of a run: ALGORITHMS.md 1d, 4d and 5."""

import pytest

JITTER = '[disturbances.noise]\nkind = "jitter"\nspread = "20 %"\n'


def test_an_iteration_of_bsp_takes_as_long_as_its_slowest_worker(devices, run):
    cluster = devices(1, 2, 7, fixed_ms=3, more=JITTER, disturb='"noise"')
    result = run(cluster, "bsp", batch=48, iterations=50)
    slowest = [
        max(cluster.disturbance().seconds(worker=w, iteration=k, batch_size=16, natural_seconds=0.0) for w in range(3))
        for k in range(50)
    ]
    assert result.seconds == pytest.approx(sum(slowest), rel=1e-12)
    assert result.commits == 50
    assert all(
        each.compute_seconds + each.wait_seconds == pytest.approx(result.seconds, rel=1e-12) for each in result.workers
    )


def test_bsp_over_servers_takes_the_time_of_bsp_without(devices, run):
    cluster = devices(1, 2, 7, fixed_ms=3, more=JITTER, disturb='"noise"')
    without = run(cluster, "bsp", epoch_samples=48 * 10 + 9)
    served = run(cluster, "bsp:engine=server", epoch_samples=48 * 10 + 9)
    assert served.seconds == pytest.approx(without.seconds, rel=1e-12)
    assert served.commits == without.commits
    assert served.waiting_share == pytest.approx(without.waiting_share, rel=1e-9)


def test_asp_runs_at_the_sum_of_the_speeds(devices, run):
    result = run(devices(1, 2, 4, 8), "asp", batch=128, iterations=1_000)
    assert result.samples_per_second == pytest.approx(1000 * (1 + 1 / 2 + 1 / 4 + 1 / 8), rel=2e-3)
    assert result.over_ideal == pytest.approx(1.0, abs=2e-3)
    assert result.waiting_share < 2e-3
    assert [each.iterations for each in result.workers] == pytest.approx([2133, 1067, 533, 267], rel=0.01)


@pytest.mark.parametrize(("slowdown", "bsp_over_asp"), [(4, 1.049), (2, 1.032)])
def test_work_that_is_not_waited_for_costs_what_the_form_of_groups_says(devices, run, slowdown, bsp_over_asp):
    # G = N = 16: T(G) over that without delay is 1 / ((G - 1) / G + 1 / (G s)), and s where G = 1.
    cluster = devices(*[2] * 15, 2 * slowdown)
    undelayed = 16 / 0.002
    asp = run(cluster, "asp", iterations=400)
    assert undelayed / asp.samples_per_second == pytest.approx(1 / (15 / 16 + 1 / (16 * slowdown)), rel=0.005)
    assert undelayed / asp.samples_per_second == pytest.approx(bsp_over_asp, rel=0.005)
    assert undelayed / run(cluster, "bsp").samples_per_second == pytest.approx(slowdown, rel=1e-9)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_ssp_settles_to_the_slowest_worker_s_period(devices, run, bound):
    # In the long run everyone does one iteration in the time of the slowest one's, however large the bound.
    result = run(devices(1, 2, 5), f"ssp:bound={bound}", batch=48, iterations=3_000)
    assert result.samples_per_second == pytest.approx(48 / (16 * 0.005), rel=0.005)
    assert result.largest_lead == bound
    assert result.workers[2].wait_seconds == 0.0


# ALGORITHMS.md section 5, the table of 5c.6: what the fast one of two workers waits, and the largest gap.


@pytest.mark.parametrize("milliseconds", [2.0, 2.17])
@pytest.mark.parametrize("scheme", ["ssp:bound=3", "dssp:lower=3,upper=15"])
def test_of_two_lastingly_unequal_workers_a_bounded_one_waits_half_of_its_time(devices, run, milliseconds, scheme):
    result = run(devices(1, milliseconds), scheme, iterations=4_000)
    fast = result.workers[0]
    assert fast.wait_seconds / fast.present_seconds == pytest.approx(1 - 1 / milliseconds, abs=0.01)
    assert result.largest_lead == 3 if scheme.startswith("ssp") else 3 < result.largest_lead <= 15


@pytest.mark.parametrize("milliseconds", [2.0, 2.17])
def test_dssp_without_its_bound_is_asp(devices, run, milliseconds):
    cluster = devices(1, milliseconds)
    unbounded = run(cluster, "dssp:bounded=false", iterations=4_000)
    assert unbounded.workers[0].wait_seconds / unbounded.workers[0].present_seconds <= 0.003
    assert unbounded.samples_per_second == pytest.approx(run(cluster, "asp", iterations=4_000).samples_per_second, 5e-3)
    assert unbounded.largest_lead > 1_000
    # Unbounded over bounded: 0.67 of its time at equal global samples.
    bounded = run(cluster, "dssp", iterations=4_000)
    assert unbounded.seconds / bounded.seconds == pytest.approx(2 / (1 + milliseconds), rel=0.01)


def test_of_nearly_equal_workers_with_jitter_bounds_gain_what_the_page_says(devices, run):
    # The page's noise is uniform within ten per cent, whose standard deviation this is.
    noise = '[disturbances.noise]\nkind = "jitter"\nspread = "5.8 %"\n'
    cluster = devices(0.98, 0.99, 1.01, 1.02, more=noise, disturb='"noise"')
    pace = {
        each: run(cluster, each, iterations=3_000).samples_per_second for each in ("bsp", "ssp:bound=3", "dssp", "asp")
    }
    assert pace["ssp:bound=3"] / pace["bsp"] == pytest.approx(1.045, abs=0.01)
    assert pace["dssp"] == pytest.approx(pace["ssp:bound=3"], rel=0.01)
    assert pace["ssp:bound=3"] < pace["asp"]


def test_lb_bsp_reaches_the_time_that_the_form_gives(devices, run):
    # T* = (X + sum(a_i / b_i)) / sum(1 / b_i) for t_i = a_i + b_i x.
    a, b, batch = 0.010, (0.001, 0.001, 0.002, 0.004), 512
    ideal = (batch + sum(a / each for each in b)) / sum(1 / each for each in b)
    cluster = devices(1, 1, 2, 4, fixed_ms=10)
    _, kept, _ = run(cluster, "lb-bsp", batch=batch, iterations=200, logged=True)
    times = [event.iteration_seconds for event in kept[0].events if event.kind == "iteration"]
    assert times[0] == pytest.approx(a + 128 * 0.004)
    assert max(times[100:]) <= ideal * 1.02
    assert min(times[100:]) >= ideal * 0.999


def test_balancing_gains_what_the_speeds_of_r2sp_s_cluster_allow(devices, run):
    cluster = devices(2.3349, 2.3349, 1.58689, 1.58689, *[1.095636] * 4)
    bsp, balanced = (run(cluster, each, batch=4096, iterations=400).samples_per_second for each in ("bsp", "lb-bsp"))
    assert balanced / bsp == pytest.approx(1.68, abs=0.02)


def test_dbs_equalises_times_in_proportion_after_one_epoch(devices, run):
    result, kept, _ = run(devices(1, 2, 4), "dbs", batch=70, iterations=30, epoch_samples=700, logged=True)
    plans = [event.batch_sizes for event in kept[0].events if event.kind == "plan"]
    assert plans == [[24, 23, 23], [40, 20, 10]]
    assert result.samples == 2100


def test_local_sgd_waits_once_a_period_for_what_a_constant_straggler_takes(devices, run):
    cluster = devices(1, 1, 3)
    bsp, local = run(cluster, "bsp"), run(cluster, "local-sgd:period=4")
    assert local.seconds == pytest.approx(bsp.seconds, rel=1e-9)  # it saves exchanges, not waiting
    assert (bsp.commits, local.commits) == (100, 25)


def test_steps_by_speed_save_waiting_too(devices, run):
    cluster = devices(1, 1, 2.5)
    equal = run(cluster, "diloco:period=4", batch=12, exchange_seconds=0.008)
    by_speed, kept, _ = run(cluster, "diloco:period=4,steps=speed", batch=12, exchange_seconds=0.008, logged=True)
    assert equal.seconds == pytest.approx(100 * 0.010 + 25 * 0.008)
    # 5, 5 and 2 batches of 4 in a period, and in the first one 2 each and then 3, 2 and 1.
    assert by_speed.seconds == pytest.approx(0.020 + 0.012 + 24 * 0.020 + 25 * 0.008)
    done = [[event.samples for event in log.events if event.kind == "iteration"] for log in kept[:3]]
    assert [each[:2] for each in done] == [[20, 20], [16, 20], [12, 8]]
    assert by_speed.samples == equal.samples


def test_local_sgd_saves_exchanges(devices, run):
    cluster = devices(1, 1)
    bsp = run(cluster, "bsp", exchange_seconds=0.008)
    local = run(cluster, "local-sgd:period=4", exchange_seconds=0.008)
    assert bsp.seconds == pytest.approx(100 * (0.016 + 0.008))
    assert local.seconds == pytest.approx(100 * 0.016 + 25 * 0.008)
    assert local.communication_share == pytest.approx(25 * 0.008 / local.seconds)


def test_periods_on_servers_save_exchanges_and_their_leads_count_periods(devices, run):
    # Of devices that hold 16 samples, since a period of 64 is computed in steps of 16; 2 steps of them at 1 ms.
    cluster = devices(1, 1, 8)
    asp, ssp = (
        run(cluster, f"{scheme},period=4", batch=48, iterations=300) for scheme in ("asp:rate=raw", "ssp:bound=2")
    )
    assert asp.samples == ssp.samples == 300 * 48
    assert ssp.largest_lead == 2 < asp.largest_lead
    assert asp.workers[0].iterations == pytest.approx(300 * 48 / 64 * 8 / 17, abs=4)
    by_speed = run(cluster, "asp:period=4,steps=speed", batch=48, iterations=300)
    # With 12 steps in a period, they are 6, 5 and 1; in a period of equal steps the slowest takes 8 times as long.
    assert by_speed.workers[2].iterations > 2 * asp.workers[2].iterations


@pytest.mark.parametrize("wire", ["float32", "int8"])
def test_fragments_send_as_many_bytes_in_smaller_exchanges(devices, run, wire):
    # Two workers that compute 16 ms an iteration, behind links of 1 MB/s; 22 iterations are two periods and a part.
    lan = '[links.lan]\nbandwidth = "8 Mbit/s"\nlatency = "0 s"\n'
    cluster = devices(1, 1, more=lan, worker='link = "lan"')

    def of(fragments):
        scheme = f"diloco:period=8,wire={wire},fragments={fragments}"
        result, kept, _ = run(cluster, scheme, iterations=22, message_bytes=80_000, logged=True)
        exchanges = [event.comm_seconds for event in kept[0].events if event.kind == "iteration"]
        assert result.seconds == pytest.approx(22 * 0.016 + sum(exchanges))
        assert result.workers[0].comm_seconds == pytest.approx(sum(exchanges))
        return exchanges

    whole, parts = of(1), of(4)
    assert whole == pytest.approx([whole[0]] * 3)
    if wire == "float32":
        assert whole[0] == pytest.approx(0.080)
    # At iterations 2, 4 to 20, and all four at the end.
    assert parts == pytest.approx([whole[0] / 4] * 10 + [whole[0]])


def test_a_delay_hides_an_exchange_behind_as_many_iterations(devices, run):
    lan = '[links.lan]\nbandwidth = "8 Mbit/s"\nlatency = "0 s"\n'
    cluster = devices(1, 1, more=lan, worker='link = "lan"')
    _, kept, _ = run(cluster, "diloco:period=8,delay=3", iterations=22, message_bytes=80_000, logged=True)
    # 80 ms, of which three iterations hide 48; at the end what left one iteration ago comes first.
    expected = [0.032, 0.032, 0.064 + 0.080]
    assert [event.comm_seconds for event in kept[0].events if event.kind == "iteration"] == pytest.approx(expected)
