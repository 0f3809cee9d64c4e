"""What a launcher does about workers that it sees stopped, or not at all."""

import pytest

from evenstep.core.absence import Absence
from evenstep.core.supervision import End, Say

ALL = (0, 1, 2)
STOPPED = "worker 1 stood still for 4 s, stopped by a signal such as SIGSTOP: find out who sent it"


def looking(silent=20.0, timeout=4.0):
    absence = Absence(3, silent_seconds=silent, timeout_seconds=timeout)

    def look(now, *, running=ALL, stopped=(), done=(), came=ALL):
        return absence.look(now, running=running, stopped=stopped, done=done, came=came)

    return look


@pytest.mark.parametrize("limits", [{}, {"silent": 4.0, "timeout": 300.0}])
def test_a_worker_that_is_stopped_for_longer_than_the_shorter_limit_is_ended_once(limits):
    look = looking(**limits)
    assert look(0.0) == look(10.0, stopped=[1]) == look(14.0, stopped=[1]) == []
    assert look(14.1, stopped=[1]) == [Say(STOPPED), End(1)]
    assert look(20.0, stopped=[1]) == []


def test_a_worker_that_goes_on_in_time_is_not_ended_however_often_it_is_stopped():
    look = looking()
    for now in range(0, 60, 3):
        assert look(float(now), stopped=[1]) == look(now + 1.0) == []


def test_workers_that_are_all_stopped_keep_nobody_waiting():
    look = looking()
    assert look(0.0, stopped=ALL) == look(99.0, stopped=ALL) == []
    assert look(100.0, stopped=[1], running=[1]) == look(200.0, stopped=[1], running=[1]) == []


def test_a_worker_that_does_not_come_is_ended_once_others_wait_for_it():
    look = looking()
    assert look(0.0, came=[]) == look(99.0, came=[]) == look(100.0, came=[0, 2]) == look(104.0, came=[0, 2]) == []
    late = "worker 1 did not come to prepare within 4 s, and is ended"
    assert look(104.1, came=[0, 2]) == [Say(late), End(1)]


def test_those_that_wait_for_a_worker_that_ended_before_it_came_are_ended():
    look = looking()
    assert look(0.0, running=[0, 2], done=[1], came=[0]) == []
    ended = "worker 1 ended with exit code 0 before it called prepare; the others are stopped"
    assert look(1.1, running=[0, 2], done=[1], came=[0]) == [Say(ended), End(0), End(2)]


def test_a_worker_that_is_done_is_missed_by_nobody():
    look = looking()
    assert look(0.0, running=[0, 2], done=[1]) == look(99.0, running=[0, 2], done=[1]) == []
