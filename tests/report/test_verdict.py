"""The verdict in one line, and the gain beside it, on logs whose cause is known."""

import pytest
from support.made_log import events_of

from evenstep.report.gain import gain_of
from evenstep.report.overview import overview_of
from evenstep.report.recorded import recorded_run
from evenstep.report.verdict import Cause, verdict_of

FAST, SLOW = (0.001, 0.020, 0.001), (0.001, 0.080, 0.001)
STARVED = (0.061, 0.020, 0.001)
CHATTY = (0.001, 0.020, 0.061)


def run_of(*parts, **more):
    return recorded_run(events_of(parts, **more))


def test_a_worker_that_computes_longer_is_named_with_what_it_costs():
    verdict = verdict_of(run_of(FAST, FAST, SLOW))
    assert (verdict.worker, verdict.cause) == (2, Cause.COMPUTE)
    assert verdict.slowdown == pytest.approx(4)
    # Two of three workers wait 60 of 87 ms.
    assert verdict.cost == pytest.approx(2 / 3 * 60 / 87)
    assert verdict.text.startswith("Worker 2 computes 4x slower, and waiting for it takes 46% of all workers' time")
    assert "lb-bsp" in verdict.text


def test_a_worker_that_waits_for_its_input_is_not_taken_for_one_that_computes_slowly():
    run = run_of(FAST, STARVED, FAST)
    verdict = verdict_of(run)
    assert (verdict.worker, verdict.cause) == (1, Cause.INPUT)
    assert verdict.cost == pytest.approx(2 / 3 * 60 / 87)
    assert "num_workers" in verdict.text
    assert "slower" not in verdict.text
    # What the others wrote down as communication was waiting.
    assert run.iterations[0].wait_seconds[3] == pytest.approx(0.060)
    assert run.iterations[0].comm_seconds[3] == pytest.approx(0.005)
    assert run.iterations[1].wait_seconds.max() == pytest.approx(0.0)


def test_a_script_that_does_more_on_one_worker_is_told_from_both():
    verdict = verdict_of(run_of(CHATTY, FAST, FAST))
    assert (verdict.worker, verdict.cause) == (0, Cause.SCRIPT)
    assert "between its iterations" in verdict.text


def test_a_slow_computer_with_slow_input_is_called_by_what_delays_it_more():
    assert verdict_of(run_of(FAST, FAST, (0.011, 0.080, 0.001))).cause is Cause.COMPUTE
    assert verdict_of(run_of(FAST, FAST, (0.061, 0.040, 0.001))).cause is Cause.INPUT


def test_equal_workers_are_told_so():
    verdict = verdict_of(run_of(FAST, FAST, FAST))
    assert (verdict.worker, verdict.cause) == (None, None)
    assert verdict.text == "Nobody is slow: waiting takes 0% of all workers' time."


def test_slowness_that_sizes_have_evened_out_is_still_named():
    sizes = [(16, 16, 4)] * 12
    run = run_of(FAST, FAST, FAST, scheme="lb-bsp", sizes=sizes, plans=[(0, (12, 12, 12)), (1, (16, 16, 4))])
    verdict = verdict_of(run)
    assert (verdict.worker, verdict.cause, verdict.cost) == (2, Cause.COMPUTE, pytest.approx(0))
    assert verdict.slowdown == pytest.approx(4)
    assert "from 12 to 4 samples" in verdict.text


def test_transfer_that_takes_the_time_is_nobodys_fault():
    tiny = (0.0001, 0.002, 0.0001)
    verdict = verdict_of(run_of(tiny, tiny))
    assert (verdict.worker, verdict.cause) == (None, Cause.TRANSFER)
    assert verdict.text.startswith("Transfer takes 69% of all workers' time")


def test_a_worker_on_its_own_waits_for_nobody():
    assert verdict_of(
        run_of(FAST)
    ).text == "One worker, which waits for its input 4% of its time: more data workers" + (" (num_workers) would help.")


def test_the_gain_is_that_of_the_speeds_in_the_log():
    sizes = [(16, 16, 4)] * 12
    parts = ((0.0, 0.016, 0.0), (0.0, 0.016, 0.0), (0.0, 0.016, 0.0))
    gain = gain_of(run_of(*parts, scheme="lb-bsp", sizes=sizes))
    assert gain.measured == pytest.approx(36 / 0.021)
    assert gain.equal == pytest.approx(36 / (12 * 0.004 + 0.005))
    assert gain.ideal == pytest.approx(36 / 0.016)
    assert gain.speed_up == pytest.approx(53 / 21)
    assert gain.of_ideal == pytest.approx(16 / 21)


def test_equal_sizes_gain_nothing_over_themselves():
    assert gain_of(run_of(FAST, FAST, SLOW)).speed_up == pytest.approx(1)


def test_plan_changes_have_a_reason():
    sizes = [(12, 12, 12)] * 6 + [(16, 16, 4)] * 6
    run = run_of(FAST, FAST, SLOW, scheme="lb-bsp", sizes=sizes, plans=[(0, sizes[0]), (6, sizes[6])])
    (move,) = overview_of("run", run).moves
    assert (move.iteration, move.before, move.after) == (6, sizes[0], sizes[6])
    assert move.seconds == pytest.approx(6 * 0.087)
    assert move.reason == "first speeds known: worker 2 needs 4.00 times worker 0's time"


def test_of_two_workers_the_slow_one_is_compared_with_the_other():
    assert verdict_of(run_of(FAST, SLOW)).slowdown == pytest.approx(4)


def served(worker, *, compute, held, lead, count=8):
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
    verdict = verdict_of(recorded_run(events))
    assert (verdict.worker, verdict.cause) == (2, Cause.COMPUTE)
    assert verdict.cost == pytest.approx(60 / 126)
    assert verdict.text == (
        "Worker 2 computes 4x slower; the others were held for it 48% of all workers' time, and ran up to 3 iterations"
        " ahead."
    )
