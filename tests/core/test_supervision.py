"""What is said and done when workers of a run on servers die, hang, leave or come back."""

import pytest

from evenstep.core.ending import Ending
from evenstep.core.supervision import End, Restarts, Say, Stop, Supervision, Why

KILLED = "was killed by SIGKILL"


class Run:
    """Three workers that have come, unless told otherwise; what follows from each event, as text."""

    def __init__(self, *, kept=True, come=True, restarts=0):
        self.supervision = Supervision(workers=3, kept=kept, restarts=restarts)
        for worker in range(3 if come else 0):
            assert self.supervision.joined(worker, 10.0) == []

    def joined(self, worker):
        return told(self.supervision.joined(worker, 10.0))

    def left(self, worker, why, now=0.0, **more):
        return told(self.supervision.left(worker, why, now, **more))

    def ended(self, worker, exit_code=-9, **more):
        return told(self.supervision.ended(Ending(worker=worker, exit_code=exit_code, **more)))

    def look(self, now, *, last=False):
        return told(self.supervision.look(now, last=last))


def told(actions):
    names = {Say: "{}", End: "end {}", Stop: "stop: {}"}
    return [
        names[type(each)].format(each.text if isinstance(each, Say) else getattr(each, "why", None) or each.worker)
        for each in actions
    ]


def test_a_death_is_said_once_with_what_follows():
    run = Run()
    assert run.left(1, Why.ENDED, in_loop=True) == []
    assert run.ended(1) == [f"worker 1 {KILLED}; the others go on"]
    assert run.left(0, Why.DONE) == []
    assert run.ended(0, exit_code=0) == []
    assert run.ended(2) == [f"worker 2 {KILLED}"]


def test_a_restart_and_the_return_are_said():
    run = Run(restarts=3)
    assert run.ended(1, again=True) == [f"worker 1 {KILLED}; it is started again (1 of 3)"]
    assert run.left(1, Why.ENDED, in_loop=True) == []
    assert run.joined(1) == ["worker 1 is back"]
    assert run.joined(1) == []


def test_who_is_given_up_is_said_with_the_reason_and_that_it_is_back():
    run = Run()
    assert run.left(1, Why.SILENT, seconds=20.0) == ["worker 1 was silent for 20 s; the others go on"]
    assert run.joined(1) == ["worker 1 is back"]
    doing = "has been outside the loader for 14 s, after iteration 57"
    assert run.left(1, Why.HUNG, seconds=9.0, doing=doing) == [
        "worker 1 kept the others waiting for 9 s (it has been outside the loader for 14 s, after iteration 57);"
        " the others go on"
    ]


def test_nothing_is_said_of_a_worker_that_takes_another_place_itself():
    assert Run().left(1, Why.AGAIN, in_loop=True) == []


def test_a_death_before_the_run_begins_stops_it_with_one_sentence():
    run = Run(come=False)
    assert run.ended(2, exit_code=1, message="no data") == [
        "stop: worker 2 ended with exit code 1: no data; the others were stopped, since all workers must call prepare"
    ]
    assert run.ended(0) == run.ended(1) == []


@pytest.mark.parametrize("met_first", [True, False])
def test_an_exit_with_0_before_prepare_stops_a_run_in_which_another_waits_there(met_first):
    run = Run(come=False)
    heard = [lambda: told(run.supervision.met(0)), lambda: run.ended(1, exit_code=0)]
    first, second = heard if met_first else reversed(heard)
    assert first() == []
    stopped = "the others were stopped, since all workers must call prepare"
    assert second() == [f"stop: worker 1 ended with exit code 0 before it called prepare; {stopped}"]
    assert told(run.supervision.met(2)) == run.ended(0) == []


def test_workers_that_never_call_prepare_may_end_one_after_another():
    run = Run(come=False)
    assert run.ended(1, exit_code=0) == run.ended(0, exit_code=0) == run.ended(2, exit_code=0) == []


def test_workers_that_have_come_to_prepare_and_begun_may_end():
    run = Run(come=False)
    for worker in range(3):
        assert told(run.supervision.met(worker)) == []
    for worker in range(3):
        assert run.joined(worker) == []
    assert run.ended(1, exit_code=0) == []


def test_a_death_before_the_run_begins_is_no_reason_to_stop_while_restarts_are_left():
    run = Run(come=False, restarts=1)
    assert run.ended(2, again=True) == [f"worker 2 {KILLED}; it is started again (1 of 1)"]
    assert run.joined(2) == ["worker 2 is back"]


@pytest.mark.parametrize("server_first", [True, False])
def test_an_exit_with_0_in_mid_epoch_without_a_goodbye_is_said_whichever_is_heard_of_first(server_first):
    run = Run()
    heard = [lambda: run.left(1, Why.ENDED, in_loop=True), lambda: run.ended(1, exit_code=0)]
    first, second = heard if server_first else reversed(heard)
    assert first() == []
    assert second() == ["worker 1 ended with exit code 0 in the middle of an epoch; the others go on"]
    assert run.supervision.lost == {1: "ended with exit code 0 in the middle of an epoch"}


def test_without_keepers_the_end_of_a_connection_in_mid_epoch_is_said():
    assert Run(kept=False).left(1, Why.ENDED, in_loop=True) == ["worker 1 ended in the middle of an epoch"]
    assert Run(kept=False).left(1, Why.ENDED) == []


def test_a_worker_that_broke_off_and_then_failed_has_one_line():
    run = Run()
    assert run.left(1, Why.DONE, now=5.0, in_loop=True) == []
    assert run.ended(1, exit_code=1) == ["worker 1 ended with exit code 1; the others go on"]
    assert run.look(9.0) == run.look(9.0, last=True) == []


def test_a_worker_that_breaks_off_alone_is_said_to():
    run = Run()
    assert run.left(1, Why.DONE, now=5.0, in_loop=True) == []
    assert run.ended(1, exit_code=0) == []
    assert run.look(7.0) == []
    assert run.look(8.5) == ["worker 1 left in the middle of an epoch; the others go on"]
    assert run.look(9.0) == []


def test_a_worker_that_others_go_on_without_after_an_epoch_is_said_to_have_left():
    run = Run()
    assert run.left(1, Why.DONE) == []
    assert told(run.supervision.missing(1)) == ["worker 1 ended early, between two epochs; the others go on"]


def test_one_that_left_without_a_goodbye_is_said_to_have_failed_or_ended_early_in_any_order():
    early = ["worker 1 ended early, between two epochs; the others go on"]
    killed = ["worker 1 was killed by SIGKILL; the others go on"]
    for exit_code, says in ((0, early), (-9, killed)):
        run = Run()
        assert run.left(1, Why.ENDED) + told(run.supervision.missing(1)) == []
        assert run.ended(1, exit_code=exit_code) == says
        run = Run()
        assert run.left(1, Why.ENDED) + run.ended(1, exit_code=exit_code) + told(run.supervision.missing(1)) == says


def test_a_worker_that_breaks_off_alone_is_said_to_where_the_others_finish_soon_after():
    run = Run()
    run.left(1, Why.DONE, now=5.0, in_loop=True)
    for worker in (0, 2):
        assert run.left(worker, Why.DONE, now=5.5) == []
    for worker in range(3):
        run.ended(worker, exit_code=0)
    assert run.look(6.0) == []
    assert run.look(6.0, last=True) == ["worker 1 left in the middle of an epoch; the others finished without it"]


def test_nothing_is_said_where_all_break_off_together():
    run = Run()
    for worker in range(3):
        assert run.left(worker, Why.DONE, now=float(worker), in_loop=True) == []
    assert run.look(20.0) == run.look(20.0, last=True) == []


def test_a_worker_that_evaluates_after_the_others_have_ended_is_told_of_once_and_goes_on():
    run = Run()
    run.ended(0, exit_code=0)
    assert run.look(0.0) == []
    run.ended(2, exit_code=0)
    assert run.look(1.0) == run.look(11.0) == []
    assert run.look(11.5) == ["all others ended 10 s ago; worker 1 still runs"]
    assert run.look(30.0) == []


def test_nothing_is_said_of_the_last_worker_before_the_run_begins():
    run = Run(come=False)
    run.ended(0, exit_code=0)
    run.ended(2, exit_code=0)
    assert run.look(0.0) == run.look(1000.0) == []


def test_a_worker_that_was_given_up_is_ended_its_timeout_after_all_others_have():
    run = Run()
    run.left(1, Why.SILENT, seconds=20.0)
    run.ended(0, exit_code=0)
    assert run.look(0.0) == []
    run.ended(2, exit_code=0)
    assert run.look(1.0) == run.look(11.0) == []
    assert run.look(11.5) == ["worker 1 did not come back within 10 s, and is ended", "end 1"]
    assert run.look(30.0) == []
    assert run.supervision.lost == {1: "was silent for 20 s and did not come back"}


@pytest.mark.parametrize("why", [Why.DONE, Why.ENDED])
def test_without_keepers_the_end_of_a_connection_is_that_of_a_worker(why):
    run = Run(kept=False)
    run.left(1, Why.SILENT, seconds=20.0)
    run.left(0, why)
    run.left(2, Why.DONE)
    assert run.supervision.awaits
    assert run.look(1.0) == []
    assert run.look(11.5) == ["worker 1 did not come back within 10 s; the run is ended", "end 1"]
    assert not run.supervision.awaits


def test_a_worker_that_comes_back_in_time_is_not_ended():
    run = Run()
    run.left(1, Why.SILENT, seconds=20.0)
    run.ended(0, exit_code=0)
    run.ended(2, exit_code=0)
    run.look(1.0)
    assert run.joined(1) == ["worker 1 is back"]
    assert run.look(20.0) == []
    assert not run.supervision.awaits


def test_workers_of_whom_none_goes_on_are_ended_too():
    run = Run()
    assert run.left(0, Why.SILENT, seconds=20.0) == ["worker 0 was silent for 20 s; the others go on"]
    run.left(1, Why.SILENT, seconds=20.0)
    assert run.left(2, Why.SILENT, seconds=20.0) == ["worker 2 was silent for 20 s"]
    run.look(0.0)
    assert [each for each in run.look(11.0) if each.startswith("end")] == ["end 0", "end 1", "end 2"]


MISSED = {"exit_code": 1, "message": "WorkerLostError: it missed 1"}


@pytest.mark.parametrize("workers", [3, 0])
def test_a_worker_that_still_runs_a_minute_after_the_others_is_said_to_once(workers):
    restarts = Restarts(0, workers)
    restarts.ended(Ending(worker=0, exit_code=0))
    assert restarts.look(0.0) == restarts.look(100.0) == []
    restarts.ended(Ending(worker=2, exit_code=0))
    assert restarts.look(100.0) == restarts.look(150.0) == []
    expected = ["all others ended 60 s ago; worker 1 still runs"] if workers else []
    assert told(restarts.look(161.0)) == expected
    assert restarts.look(300.0) == []


def test_a_worker_that_has_no_others_is_not_said_to_be_the_last():
    restarts = Restarts(0, 1)
    assert restarts.look(0.0) == restarts.look(100.0) == []


def test_a_restart_of_all_workers_is_said_once_of_the_cause():
    restarts = Restarts(2)
    restarts.ended(Ending(worker=0, **MISSED))
    assert restarts.look(0.0) == restarts.look(0.5) == []
    restarts.ended(Ending(worker=1, exit_code=-9))
    assert restarts.look(0.5) == []
    assert told(restarts.look(1.5)) == [f"worker 1 {KILLED}; all workers start again (1 of 2)"]
    assert restarts.look(9.0) == []


def test_a_restart_after_a_worker_that_ended_well_too_early_is_said_of_that_worker():
    restarts = Restarts(2)
    for restart in (1, 2):
        now = 10.0 * restart
        restarts.ended(Ending(worker=restart, exit_code=0))
        restarts.ended(Ending(worker=0, restarts=restart - 1, **MISSED))
        assert restarts.look(now) == []
        assert told(restarts.look(now + 2.0)) == [
            f"worker {restart} ended with exit code 0 before the others were done; all workers start again"
            f" ({restart} of 2)"
        ]


def test_nothing_is_said_of_the_last_failure_of_all_which_is_the_run_s():
    restarts = Restarts(2)
    restarts.ended(Ending(worker=1, exit_code=-9, restarts=2))
    assert restarts.look(0.0) == restarts.look(9.0, last=True) == []


def test_a_restart_is_said_before_the_run_ends():
    restarts = Restarts(2)
    restarts.ended(Ending(worker=1, exit_code=-9, restarts=1))
    assert told(restarts.look(0.0, last=True)) == [f"worker 1 {KILLED}; all workers start again (2 of 2)"]
