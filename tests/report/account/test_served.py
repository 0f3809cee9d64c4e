"""What servers see of a run, and what they say of it at its end."""

from evenstep.report.account.served import ServedTotals, served_summary_lines, served_verdict
from evenstep.telemetry.events import Begun, Left, Pushed


def left(totals, worker, why, *, early=False):
    totals.take(Left(at=0.0, version=0, worker=worker, why=why, early=early))


def began(totals, worker, number):
    totals.take(Begun(at=0.0, version=0, worker=worker, number=number, epoch=number, ahead=0))


def iteration(totals, worker, began, compute, *, samples=12, held=0.0, lead=0):
    totals.answered(worker, began, held=held, lead=lead, over=False)
    row = (samples, round(compute * 1e6), 0, 0)
    about = {"claim": 0, "pulled": 0, "samples": samples, "units": samples, "row": row}
    totals.take(Pushed(at=began + compute, version=0, worker=worker, **about))


def a_run(samples=(12, 12), iterations=20):
    """Worker 0 computes 1 s and is held 2 s, worker 1 computes 3 s, again and again."""
    totals = ServedTotals(12)
    for number in range(iterations):
        iteration(totals, 0, 3.0 * number, 1.0, samples=samples[0], held=2.0 if number else 0.0, lead=1)
        iteration(totals, 1, 3.0 * number, 3.0, samples=samples[1])
    return totals


def finished(totals):
    for worker in range(2):
        totals.answered(worker, 60.0, held=0.0, lead=0, over=True)
        left(totals, worker, "is done")
    return totals


def test_a_run_on_servers_in_two_lines():
    totals = finished(a_run())
    assert served_summary_lines(totals, "ssp:bound=1") == [
        "ssp:bound=1 trained 8 samples/s for 60 s on 2 workers; batch sizes 12 12.",
        "Worker 1 computes 3x slower; waiting for it takes 32% of all workers' time, and the others ran up to 1"
        " iteration ahead.",
    ]


def test_a_run_whose_workers_were_all_lost_has_no_summary():
    totals = a_run()
    for worker in range(2):
        left(totals, worker, "has ended")
    assert served_summary_lines(totals, "ssp") == []


def test_how_slow_a_worker_is_is_told_of_sizes_that_all_had():
    slow = {each.worker: each.pace for each in a_run(samples=(18, 6)).workers()}
    assert slow == {0: None, 1: None}


def test_a_short_run_on_servers_has_no_verdict_but_names_who_was_lost():
    totals = a_run(iterations=5)
    for number in range(5):
        iteration(totals, 2, 3.0 * number, 3.0)
    left(totals, 1, "has ended")
    assert served_verdict(totals.workers()).text == (
        "Too short for a verdict: 5 iterations in 15 s; about 15 more iterations would tell."
        " Worker 1 was lost after 5 iterations (has ended)."
    )


def test_what_lies_between_passes_is_no_training():
    totals = finished(a_run())
    totals.answered(0, 1000.0, held=0.0, lead=0, over=False)
    assert totals.seconds == 60


# Workers that leave before the others: worker 1 would be called slow for what it did before.


def with_a_third(totals):
    """A third worker that goes on as worker 0 does."""
    for number in range(20):
        iteration(totals, 2, 3.0 * number, 1.0, held=2.0 if number else 0.0, lead=1)
    left(totals, 0, "is done")
    left(totals, 2, "is done")
    return totals


def test_a_worker_that_left_in_the_middle_of_a_pass_is_not_called_slow():
    totals = a_run()
    left(totals, 1, "is done", early=True)
    verdict = served_verdict(with_a_third(totals).workers(), name_lost=False)
    assert verdict.worker is None
    assert verdict.text.endswith(" Worker 1 left early, after 20 iterations.")


def test_nor_is_one_that_left_between_two_passes():
    totals = a_run()
    for worker in range(3):
        began(totals, worker, 0)
    left(totals, 1, "is done")
    for worker in (0, 2):
        began(totals, worker, 1)
    assert served_verdict(with_a_third(totals).workers()).text.endswith(" Worker 1 left early, after 20 iterations.")


def test_workers_that_all_end_their_loops_before_a_pass_does_are_judged():
    totals = a_run()
    for worker in range(2):
        left(totals, worker, "is done", early=True)
    verdict = served_verdict(totals.workers())
    assert verdict.worker == 1
    assert "early" not in verdict.text


def test_lost_workers_are_left_to_who_knows_how_they_ended():
    totals = a_run()
    left(totals, 1, "has ended")
    lines = served_summary_lines(with_a_third(totals), "ssp", name_lost=False)
    assert len(lines) == 2
    assert not any("was lost" in line for line in lines)
    left(totals, 2, "has ended")
    assert len(served_summary_lines(totals, "ssp", name_lost=False)) == 1


def test_waiting_that_a_lost_worker_may_have_caused_is_not_told_as_that_of_the_others():
    totals = ServedTotals(12)
    for number in range(20):
        for worker in range(3):
            iteration(totals, worker, 3.0 * number, 1.0, held=2.0 if number and worker < 2 else 0.0)
    left(totals, 2, "was silent")
    assert served_summary_lines(finished(totals), "ssp")[1:] == [
        "Waiting takes 66% of all workers' time, part of it until lost workers were given up.",
        "Worker 2 was lost after 20 iterations (was silent).",
    ]
