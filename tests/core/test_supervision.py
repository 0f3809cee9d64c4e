"""What is said and done when workers of a run die, hang, leave or come back."""

import pytest

from evenstep.core.ending import Ending
from evenstep.core.supervision import Supervision, Why

KILLED = "was killed by SIGKILL"


class Run:
    """Three workers on servers that have come, unless told otherwise; what follows from each event, as text."""

    def __init__(self, *, kept=True, come=True, restarts=0):
        self.supervision = Supervision(workers=3, kept=kept, restarts=restarts)
        self.now, self.before = 0.0, (set(), None)
        for worker in range(3 if come else 0):
            assert self.joined(worker) == []

    def joined(self, worker):
        self.supervision.joined(worker, 10.0)
        return self.look(self.now)

    def met(self, worker):
        self.supervision.told({"event": "meet", "worker": worker})
        return self.look(self.now)

    def begun(self, number):
        self.supervision.begun(number)
        return self.look(self.now)

    def left(self, worker, why, now=0.0, **more):
        self.supervision.left(worker, why, **more)
        return self.look(now)

    def ended(self, worker, exit_code=-9, **more):
        self.supervision.ended(Ending(worker=worker, exit_code=exit_code, **more))
        return self.look(self.now)

    def look(self, now, *, last=False):
        """What is said, and what is to be done since the last look."""
        said = self.supervision.look(now, last=last)
        (to_end, stopped), self.now = self.before, now
        self.before = self.supervision.to_end, self.supervision.stopped
        said += [f"end {worker}" for worker in sorted(self.before[0] - to_end)]
        return said if stopped == self.before[1] else [*said, f"stop: {self.before[1]}"]


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
    heard = [lambda: run.met(0), lambda: run.ended(1, exit_code=0)]
    first, second = heard if met_first else reversed(heard)
    assert first() == []
    stopped = "the others were stopped, since all workers must call prepare"
    assert second() == [f"stop: worker 1 ended with exit code 0 before it called prepare; {stopped}"]
    assert run.met(2) == run.ended(0) == []


def test_workers_that_never_call_prepare_may_end_one_after_another():
    run = Run(come=False)
    assert run.ended(1, exit_code=0) == run.ended(0, exit_code=0) == run.ended(2, exit_code=0) == []


def test_workers_that_have_come_to_prepare_and_begun_may_end():
    run = Run(come=False)
    for worker in range(3):
        assert run.met(worker) == []
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
    assert run.begun(1) == ["worker 1 ended early, between two epochs; the others go on"]


def test_one_that_left_without_a_goodbye_is_said_to_have_failed_or_ended_early_in_any_order():
    early = ["worker 1 ended early, between two epochs; the others go on"]
    killed = ["worker 1 was killed by SIGKILL; the others go on"]
    for exit_code, says in ((0, early), (-9, killed)):
        run = Run()
        assert run.left(1, Why.ENDED) + run.begun(1) == []
        assert run.ended(1, exit_code=exit_code) == says
        run = Run()
        assert run.left(1, Why.ENDED) + run.ended(1, exit_code=exit_code) + run.begun(1) == says


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
    assert run.look(1.0) == run.look(10.0) == []
    assert run.look(10.5) == ["all others ended 10 s ago; worker 1 still runs"]
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
    assert run.look(1.0) == run.look(10.0) == []
    assert run.look(10.5) == ["worker 1 did not come back within 10 s, and is ended", "end 1"]
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
    assert run.look(11.0) == []
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
    restarts = Supervision(workers=workers, together=True)
    restarts.ended(Ending(worker=0, exit_code=0))
    assert restarts.look(0.0) == restarts.look(100.0) == []
    restarts.ended(Ending(worker=2, exit_code=0))
    assert restarts.look(100.0) == restarts.look(150.0) == []
    expected = ["all others ended 60 s ago; worker 1 still runs"] if workers else []
    assert restarts.look(161.0) == expected
    assert restarts.look(300.0) == []


def test_a_worker_that_has_no_others_is_not_said_to_be_the_last():
    restarts = Supervision(workers=1, together=True)
    assert restarts.look(0.0) == restarts.look(100.0) == []


def test_a_restart_of_all_workers_is_said_once_of_the_cause():
    restarts = Supervision(workers=3, together=True, restarts=2)
    restarts.ended(Ending(worker=0, **MISSED))
    assert restarts.look(0.0) == restarts.look(0.5) == []
    restarts.ended(Ending(worker=1, exit_code=-9))
    assert restarts.look(0.5) == []
    assert restarts.look(1.5) == [f"worker 1 {KILLED}; all workers start again (1 of 2)"]
    assert restarts.look(9.0) == []


def test_the_cause_of_a_restart_is_a_worker_that_was_killed_and_not_one_that_a_framework_has_aborted():
    restarts = Supervision(workers=3, together=True, restarts=1)
    restarts.ended(Ending(worker=0, exit_code=-6))
    restarts.ended(Ending(worker=2, exit_code=-9))
    restarts.look(0.0)
    assert restarts.look(1.5) == ["worker 2 was killed by SIGKILL; all workers start again (1 of 1)"]


def test_a_restart_after_a_worker_that_ended_well_too_early_is_said_of_that_worker():
    restarts = Supervision(workers=3, together=True, restarts=2)
    for restart in (1, 2):
        now = 10.0 * restart
        restarts.ended(Ending(worker=restart, exit_code=0))
        restarts.ended(Ending(worker=0, restarts=restart - 1, **MISSED))
        assert restarts.look(now) == []
        assert restarts.look(now + 2.0) == [
            f"worker {restart} ended with exit code 0 before the others were done; all workers start again"
            f" ({restart} of 2)"
        ]


def test_nothing_is_said_of_the_last_failure_of_all_which_is_the_run_s():
    restarts = Supervision(workers=3, together=True, restarts=2)
    restarts.ended(Ending(worker=1, exit_code=-9, restarts=2))
    assert restarts.look(0.0) == restarts.look(9.0, last=True) == []


def test_a_restart_is_said_before_the_run_ends():
    restarts = Supervision(workers=3, together=True, restarts=2)
    restarts.ended(Ending(worker=1, exit_code=-9, restarts=1))
    assert restarts.look(0.0, last=True) == [f"worker 1 {KILLED}; all workers start again (2 of 2)"]


ALL = dict.fromkeys(range(3), 0.0)
STOPPED = "worker 1 stood still for 4 s, stopped by a signal such as SIGSTOP: find out who sent it"


def looking(silent=20.0, timeout=4.0):
    """Looks at the processes of three workers that end and start together; what is said, and who is to end."""
    supervision = Supervision(workers=3, together=True, silent_seconds=silent, timeout_seconds=timeout)

    def look(now, *, running=ALL, halted=(), done=(), came=ALL):
        for worker in done:
            supervision.ended(Ending(worker=worker, exit_code=0))
        supervision.processes(running=running, halted=halted, came=dict.fromkeys(came, 0.0))
        return supervision.look(now), supervision.to_end, supervision.stopped

    return look


NOTHING = ([], set(), None)


@pytest.mark.parametrize("limits", [{}, {"silent": 4.0, "timeout": 300.0}])
def test_a_worker_that_is_stopped_for_longer_than_the_shorter_limit_is_ended_and_said_to_once(limits):
    look = looking(**limits)
    assert look(0.0) == look(10.0, halted=[1]) == look(14.0, halted=[1]) == NOTHING
    assert look(14.1, halted=[1]) == ([STOPPED], {1}, None)
    assert look(20.0, halted=[1]) == ([], {1}, None)


def test_a_worker_that_was_ended_and_is_started_again_is_looked_after_like_before():
    supervision = Supervision(workers=3, together=True, restarts=1, silent_seconds=4.0)
    for begin in (0.0, 10.0):
        supervision.processes(running=ALL, halted=[1], came=ALL)
        assert supervision.look(begin) == []
        assert supervision.look(begin + 4.1) == [STOPPED]
        assert supervision.to_end == {1}
        supervision.ended(Ending(worker=1, exit_code=-15, asked_to_end=True))
        supervision.processes(running=[0, 2], halted=(), came=ALL)
        assert supervision.look(begin + 5.0) == []
        assert supervision.to_end == set()


def test_a_worker_that_goes_on_in_time_is_not_ended_however_often_it_is_stopped():
    look = looking()
    for now in range(0, 60, 3):
        assert look(float(now), halted=[1]) == look(now + 1.0) == NOTHING


def test_workers_that_are_all_stopped_keep_nobody_waiting():
    look = looking()
    assert look(0.0, halted=ALL) == look(99.0, halted=ALL) == NOTHING
    assert look(100.0, halted=[1], running=[1]) == look(200.0, halted=[1], running=[1]) == NOTHING


def test_a_worker_that_does_not_come_is_ended_once_others_wait_for_it():
    look = looking()
    waiting = {"came": [0, 2]}
    assert look(0.0, came=[]) == look(99.0, came=[]) == look(100.0, **waiting) == look(104.0, **waiting) == NOTHING
    assert look(104.1, **waiting) == (["worker 1 did not come to prepare within 4 s, and is ended"], {1}, None)


def test_a_run_in_which_others_wait_for_a_worker_that_ended_before_it_came_is_stopped():
    stopped = (
        "worker 1 ended with exit code 0 before it called prepare; the others were stopped, since all workers must call"
        " prepare"
    )
    assert looking()(0.0, running=[0, 2], done=[1], came=[0]) == ([], set(), stopped)


def test_a_worker_that_is_done_is_missed_by_nobody():
    look = looking()
    assert look(0.0, running=[0, 2], done=[1]) == look(50.0, running=[0, 2], done=[1]) == NOTHING


def elastic():
    """A run of three replicas, and looks at it: for how long some of them have been waiting, and others computing."""
    run = Run(come=False)
    supervision = run.supervision = Supervision(
        workers=3, elastic=True, restarts=1, timeout_seconds=4.0, alone_seconds=4.0
    )

    def look(now, computing, waiting=NOBODY, *, running=ALL, halted=()):
        supervision.processes(running=running, halted=halted, came=ALL, waiting=waiting, computing=computing)
        return run.look(now)

    return supervision, look


NOBODY = {}


def test_a_replica_that_hangs_is_named_once_the_others_have_waited_and_ended_once_they_have_finished():
    supervision, look = elastic()
    assert look(0.0, {0: 0.0, 1: 0.0, 2: 0.0}) == look(9.0, {0: 4.5, 1: 4.0, 2: 8.0}) == []
    hangs = "worker 2 kept the others waiting for 4 s; the others go on"
    assert look(10.0, {1: 3.0, 2: 9.0}, {0: 0.1}) == []  # Its step may be about to count, too.
    assert look(13.1, {0: 0.1, 1: 0.1, 2: 12.1}) == [hangs]
    assert look(14.0, {1: 0.1, 2: 0.0}, {0: 0.1}) == ["worker 2 is back"]
    assert look(20.0, {1: 0.1, 2: 5.0}, {0: 0.1}) == []
    assert look(23.1, {0: 1.0, 1: 1.0, 2: 8.1}) == [hangs]
    for worker in (0, 1):
        supervision.ended(Ending(worker=worker, exit_code=0))
    assert look(26.0, {0: 4.0, 1: 4.0, 2: 11.0}, running=[2]) == []
    gone = look(31.0, {0: 9.0, 1: 9.0, 2: 16.0}, running=[2])
    assert gone == ["worker 2 did not come back within 4 s, and is ended", "end 2"]
    assert supervision.lost == {2: "kept the others waiting for 4 s and did not come back"}


def test_a_replica_that_is_stopped_is_ended_also_when_the_others_have_finished_meanwhile():
    supervision, look = elastic()
    supervision.silent_seconds = 2.0
    for worker in (0, 1):
        supervision.ended(Ending(worker=worker, exit_code=0))
    assert look(1.0, {2: 1.0}, running=[2], halted=[2]) == look(3.0, {2: 3.0}, running=[2], halted=[2]) == []
    told, ended = look(3.1, {2: 3.1}, running=[2], halted=[2])
    assert told.startswith("worker 2 stood still for 2 s")
    assert ended == "end 2"


def test_replicas_that_hang_are_ended_where_too_few_are_left_to_go_on():
    supervision, look = elastic()
    assert look(0.0, {1: 4.1, 2: 4.2}, {0: 0.1}) == []
    hang = [f"worker {worker} kept the others waiting for 4 s; the others go on" for worker in (1, 2)]
    assert look(3.1, {1: 7.2, 2: 7.3}, {0: 3.2}) == hang
    assert look(19.0, {1: 23.1, 2: 23.2}, {0: 19.1}) == []
    ended = [f"worker {worker} keeps the others from going on, and is ended" for worker in (1, 2)]
    assert look(20.0, {1: 24.1, 2: 24.2}, {0: 20.1}) == [*ended, "end 1", "end 2"]
    assert supervision.to_end == {1, 2}
