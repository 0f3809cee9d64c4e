"""The verdict in one line, and the gain beside it, on logs whose cause is known."""

import pytest
from support.made_log import events_of
from support.records import run_from

from evenstep.report.account.account import Part
from evenstep.report.overview import overview_of, values_of

FAST, SLOW = (0.001, 0.020, 0.001), (0.001, 0.080, 0.001)
STARVED = (0.061, 0.020, 0.001)
CHATTY = (0.001, 0.020, 0.061)


def run_of(*parts, **more):
    """Long enough to be judged, unless it is told other sizes."""
    return run_from(events_of(parts, **{"sizes": [(10,) * len(parts)] * 60, **more}))


def verdict_of(run):
    return overview_of("run", run).summary.verdict


def test_a_worker_that_computes_longer_is_named_with_what_it_costs():
    verdict = verdict_of(run_of(FAST, FAST, SLOW))
    assert (verdict.worker, verdict.cause) == (2, Part.COMPUTE)
    assert verdict.slowdown == pytest.approx(4)
    # Two of three workers wait 60 of 87 ms.
    assert verdict.cost == pytest.approx(2 / 3 * 60 / 87)
    assert verdict.text == (
        "Worker 2 computes 4x slower, and waiting for it takes 46% of all workers' time; lb-bsp would give it smaller"
        " batches."
    )


def test_a_worker_that_waits_for_its_input_is_not_taken_for_one_that_computes_slowly():
    run = run_of(FAST, STARVED, FAST)
    verdict = verdict_of(run)
    assert (verdict.worker, verdict.cause, verdict.sizes_may_help) == (1, Part.INPUT, False)
    assert verdict.cost == pytest.approx(2 / 3 * 60 / 87)
    assert "num_workers" in verdict.text
    assert "slower" not in verdict.text
    # What the others wrote down as communication was waiting.
    assert run.iterations[0].wait_seconds[3] == pytest.approx(0.060)
    assert run.iterations[0].comm_seconds[3] == pytest.approx(0.005)
    assert run.iterations[1].wait_seconds.max() == pytest.approx(0.0)


def test_a_script_that_does_more_on_one_worker_is_told_from_both():
    verdict = verdict_of(run_of(CHATTY, FAST, FAST))
    assert (verdict.worker, verdict.cause) == (0, Part.SCRIPT)
    assert "between its iterations" in verdict.text


def test_a_slow_computer_with_slow_input_is_called_by_what_delays_it_more():
    assert verdict_of(run_of(FAST, FAST, (0.011, 0.080, 0.001))).cause is Part.COMPUTE
    assert verdict_of(run_of(FAST, FAST, (0.061, 0.040, 0.001))).cause is Part.INPUT


def test_equal_workers_are_told_so():
    verdict = verdict_of(run_of(FAST, FAST, FAST))
    assert (verdict.worker, verdict.cause) == (None, None)
    assert verdict.text == "No worker is slow: waiting takes 0% of all workers' time."


def test_communication_that_takes_the_time_is_no_worker_s_fault():
    tiny = (0.0001, 0.002, 0.0001)
    verdict = verdict_of(run_of(tiny, tiny, sizes=[(10, 10)] * 1500))
    assert (verdict.worker, verdict.cause) == (None, Part.COMMUNICATION)
    assert verdict.text.startswith("Communication takes 69% of all workers' time")


def test_a_worker_on_its_own_waits_for_nobody():
    assert verdict_of(
        run_of(FAST)
    ).text == "One worker, which waits for its input 4% of its time: more data workers" + (" (num_workers) would help.")


def test_sizes_that_never_changed_leave_their_gain_open():
    sizes, plans = [(16, 16, 4)] * 60, [(0, (16, 16, 4))]
    overview = overview_of("run", run_of(FAST, FAST, FAST, scheme="lb-bsp", sizes=sizes, plans=plans))
    assert overview.summary.verdict.worker == 2
    gained = overview.summary.over_equal_sizes
    assert gained.low == pytest.approx(1.0)
    assert gained.high > 2
    told = f"Training is {gained.ends} times as fast as with equal sizes (95% interval): worker 2 computes"
    assert overview.summary.verdict.text.startswith(told)
    assert values_of(overview)["ideal_samples_per_second"] == pytest.approx(36 / 0.020)


def compared_run(**more):
    """Three workers, of which the last is four times slower for a sample, but 8 of its 32 ms are a fixed part."""
    return run_from(compared_events(**more))


def compared_events(*, decided=40, input_seconds=0.0):
    for worker in range(3):
        yield {
            "event": "run", "worker": worker, "scheme": "lb-bsp", "engine": "collective", "global_batch_size": 36,
            "iterations_per_epoch": 100, "multiple": 1,
        }  # fmt: skip
        sizes = [("start", (12, 12, 12))] * 5 + [("speed", (16, 16, 4))] * decided
        began = 0.0
        for number, (basis, size) in enumerate(sizes):
            compute = [0.001 * size[0], 0.001 * size[1], 0.008 + 0.004 * size[2]]
            entered = input_seconds if basis == "start" else 0.0
            if not number or basis != sizes[number - 1][0]:
                yield {
                    "event": "plan", "worker": worker, "iteration": number, "batch_sizes": list(size), "basis": basis,
                }  # fmt: skip
            yield {
                "event": "iteration", "worker": worker, "iteration": number, "samples": size[worker], "basis": basis,
                "at": began, "iteration_seconds": entered + max(compute) + 0.004, "input_seconds": entered,
                "compute_seconds": compute[worker], "wait_seconds": max(compute) - compute[worker],
                "comm_seconds": 0.004,
            }  # fmt: skip
            began += entered + max(compute) + 0.004


def test_the_gain_is_told_with_the_slow_worker_and_the_waiting_that_equal_sizes_would_have_had():
    overview = overview_of("run", compared_run())
    equal, decided = 0.056 + 0.004, 0.024 + 0.004
    gained = overview.summary.over_equal_sizes
    assert gained.estimate == pytest.approx(45 * equal / (5 * equal + 40 * decided), rel=0.01)
    assert gained.low < gained.estimate < gained.high
    assert overview.summary.verdict.slowdown == pytest.approx(56 / 12, rel=0.05)
    assert overview.summary.verdict.text == (
        f"Training is {gained.estimate:.2f} times as fast as with equal sizes (95% interval {gained.ends}): worker 2"
        " computes 4.5x slower and gets 4 of 36 samples instead of 12; waiting fell from 49% to 25% of all workers'"
        " time."
    )


def test_the_numbers_of_one_run_agree():
    values = values_of(overview_of("run", compared_run()))
    speed_up = values["samples_per_second"] / values["equal_samples_per_second"]
    interval = values["over_equal_sizes"]
    assert interval["estimate"] == pytest.approx(speed_up, rel=1e-12)
    assert interval["low"] <= speed_up <= interval["high"]
    assert values["of_ideal"] == pytest.approx(values["samples_per_second"] / values["ideal_samples_per_second"])


def test_waiting_for_input_stays_what_it_was():
    fetched = overview_of("run", compared_run(input_seconds=0.030)).summary.over_equal_sizes
    equal, decided = 0.056 + 0.004, 0.024 + 0.004
    assert fetched.estimate == pytest.approx(
        (5 * 0.030 + 45 * equal) / (5 * 0.030 + 5 * equal + 40 * decided), rel=0.01
    )


def test_equal_sizes_gain_nothing_over_themselves():
    summary = overview_of("run", run_of(FAST, FAST, SLOW)).summary
    assert str(summary.over_equal_sizes) == "1.00"
    assert summary.equal_samples_per_second == summary.samples_per_second


def test_plan_changes_have_a_reason():
    sizes = [(12, 12, 12)] * 6 + [(16, 16, 4)] * 6
    run = run_of(FAST, FAST, SLOW, scheme="lb-bsp", sizes=sizes, plans=[(0, sizes[0]), (6, sizes[6])])
    (move,) = overview_of("run", run).moves
    assert (move.iteration, move.before, move.after) == (6, sizes[0], sizes[6])
    assert move.seconds == pytest.approx(6 * 0.087)
    assert move.reason == "first speeds known: worker 2 needs 4.00 times worker 0's time"


def test_small_changes_of_sizes_are_told_once_they_have_added_up():
    sizes = [(12, 12, 12)] * 2 + [(16, 16, 4)] * 3 + [(16, 15, 5)] * 3 + [(17, 13, 6)] * 3
    plans = [(number, size) for number, size in enumerate(sizes) if not number or size != sizes[number - 1]]
    first, second = overview_of("run", run_of(FAST, FAST, SLOW, scheme="lb-bsp", sizes=sizes, plans=plans)).moves
    assert (first.iteration, first.before, first.after) == (2, (12, 12, 12), (16, 16, 4))
    assert (second.iteration, second.before, second.after) == (8, (16, 16, 4), (17, 13, 6))
    assert first.reason.startswith("first speeds known: worker 2 needs 4.00 times")
    assert second.reason == "speeds are known better"


def test_of_two_workers_the_slow_one_is_compared_with_the_other():
    assert verdict_of(run_of(FAST, SLOW)).slowdown == pytest.approx(4)


def served(worker, *, compute, held, lead, count=100):
    yield {
        "event": "run", "worker": worker, "scheme": "ssp", "engine": "server", "global_batch_size": 20,
        "iterations_per_epoch": 4,
    }  # fmt: skip
    yield {"event": "plan", "worker": worker, "iteration": 0, "batch_sizes": [10, 10, 10]}
    for number in range(count):
        yield {
            "event": "iteration", "worker": worker, "iteration": number, "samples": 10, "at": number * 1.0,
            "iteration_seconds": compute + held + 0.002, "input_seconds": 0.001, "compute_seconds": compute,
            "wait_seconds": held, "comm_seconds": 0.001, "staleness": 1, "behind": 0.5, "lead": lead,
        }  # fmt: skip


def test_on_servers_the_slow_one_is_named_with_how_long_others_were_held():
    workers = [(0.010, 0.030, 3), (0.010, 0.030, 3), (0.040, 0.0, 0)]
    events = [
        event
        for worker, (compute, held, lead) in enumerate(workers)
        for event in served(worker, compute=compute, held=held, lead=lead)
    ]
    verdict = verdict_of(run_from(events))
    assert (verdict.worker, verdict.cause) == (2, Part.COMPUTE)
    assert verdict.slowdown == pytest.approx(4)
    assert verdict.cost == pytest.approx(60 / 126)
    assert verdict.text == (
        "Worker 2 computes 4x slower; waiting for it takes 48% of all workers' time, and the others ran up to 3"
        " iterations ahead."
    )


def test_a_worker_that_died_is_told_as_lost_and_not_called_slow():
    events = [
        *served(0, compute=0.010, held=0.0, lead=3),
        *served(1, compute=0.010, held=0.0, lead=3),
        *served(2, compute=0.040, held=0.0, lead=0, count=5),
    ]
    came = [{"event": "join", "worker": worker, "at": 0.0, "version": 0} for worker in range(3)]
    left = [
        {"event": "leave", "worker": 2, "at": 0.2, "version": 9, "why": "was silent for too long"},
        *({"event": "leave", "worker": worker, "at": 1.0, "version": 80, "why": "is done"} for worker in range(2)),
    ]
    overview = overview_of("run", run_from(events, [*came, *left]))
    assert (overview.summary.verdict.worker, overview.summary.verdict.cause) == (None, None)
    assert overview.summary.verdict.text == (
        "No worker is slow: waiting takes 0% of all workers' time. Worker 2 was lost after 5 iterations (was silent for"
        " too long)."
    )
    # The launcher has seen how the process ended whose connection did.
    ended = [{**left[0], "why": "has ended"}, *left[1:]]
    failed = {"event": "worker_failed", "worker": 2, "how": "was killed by SIGKILL", "at": 0.2}
    run = run_from(events, [*came, *ended], [failed])
    assert verdict_of(run).text.endswith(" Worker 2 was lost after 5 iterations (was killed by SIGKILL).")
    assert "worker 2 was killed by SIGKILL" in [each.text for each in run.happenings]
    # One that came back was not lost for good.
    back = [*left[:1], {"event": "join", "worker": 2, "at": 0.3, "version": 12}, *left[1:]]
    assert overview_of("run", run_from(events, [*came, *back])).summary.verdict.worker == 2


def test_a_worker_that_left_early_is_told_so_and_not_called_slow():
    workers = [(0.010, 100), (0.010, 100), (0.040, 30)]
    events = [
        event
        for worker, (compute, count) in enumerate(workers)
        for event in served(worker, compute=compute, held=0.0, lead=0, count=count)
    ]
    came = [{"event": "join", "worker": worker, "at": 0.0, "version": 0} for worker in range(3)]
    begun = [
        {"event": "begin", "worker": worker, "number": 0, "at": 0.1, "version": 0, "epoch": 0, "ahead": 0}
        for worker in range(3)
    ]
    went = [
        {"event": "leave", "worker": worker, "at": 5.0 - worker, "version": 9, "why": "is done"} for worker in (2, 1, 0)
    ]
    in_mid_pass = [{**went[0], "early": True}, *went[1:]]
    next_pass = [{**each, "number": 1} for each in begun[:2]]
    for server_events in ([*came, *begun, *in_mid_pass], [*came, *begun, went[0], *next_pass, *went[1:]]):
        verdict = overview_of("run", run_from(events, server_events)).summary.verdict
        assert verdict.worker is None
        assert verdict.text.endswith(" Worker 2 left early, after 30 iterations.")
    assert overview_of("run", run_from(events, [*came, *begun, *went])).summary.verdict.worker == 2


def test_a_short_run_claims_nothing():
    overview = overview_of("run", compared_run(decided=3))
    text = "Too short for a verdict: 8 iterations in 0.384 s; about 2 more iterations would tell."
    assert overview.summary.verdict.text == text
    values = values_of(overview)
    assert (values["over_equal_sizes"], values["equal_samples_per_second"]) == (None, None)
    assert [worker["slowdown"] for worker in values["workers"]] == [None] * 3
    assert values["samples_per_second"] > 0
