"""What servers see of a run, and what they say of it at its end."""

from evenstep.core.account import ServedTotals, served_summary_lines


def iteration(totals, worker, began, compute, *, samples=12, held=0.0, lead=0):
    totals.answered(worker, began, held=held, lead=lead, over=False)
    totals.pushed(worker, began + compute, samples=samples, compute_seconds=compute)


def a_run(samples=(12, 12)):
    """Worker 0 computes 1 s and is held 2 s, worker 1 computes 3 s, five times."""
    totals = ServedTotals(12)
    for number in range(5):
        iteration(totals, 0, 3.0 * number, 1.0, samples=samples[0], held=2.0 if number else 0.0, lead=1)
        iteration(totals, 1, 3.0 * number, 3.0, samples=samples[1])
    return totals


def test_a_run_on_servers_in_two_lines():
    totals = a_run()
    for worker in range(2):
        totals.left(worker, "is done")
    assert served_summary_lines(totals, "ssp:bound=1") == [
        "ssp:bound=1 trained 8 samples/s for 15 s on 2 workers; batch sizes 12 12.",
        "Worker 1 computes 3x slower; waiting for it takes 29% of all workers' time, and the others ran up to 1"
        " iteration ahead.",
    ]


def test_a_run_whose_workers_were_all_lost_has_no_summary():
    totals = a_run()
    for worker in range(2):
        totals.left(worker, "has ended")
    assert served_summary_lines(totals, "ssp") == []


def test_how_slow_a_worker_is_is_told_of_sizes_that_all_had():
    slow = {each.worker: each.pace for each in a_run(samples=(18, 6)).workers()}
    assert slow == {0: None, 1: None}
