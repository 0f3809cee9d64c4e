"""Which workers are waited for in vain, with given times."""

from dataclasses import replace

from evenstep.core.activity import Doing, Pulse, Seen
from evenstep.core.lookout import Lookout

ONE, TWO = ("a", "a", "a"), ("a", "b", "b")
"""The machines of three workers: all on one, and the last two on another."""
SILENT, TIMEOUT, STEP = 20.0, 300.0, 0.4


class Waiting:
    """Worker 0, which looks every 0.4 s while it waits in iteration 5."""

    def __init__(self, machines=ONE):
        self.lookout = Lookout(0, machines, silent_seconds=SILENT, timeout_seconds=TIMEOUT)
        self.now = self.waits_since = 0.0
        self.others = {1: (Doing.WAITING, 5, 0.0), 2: (Doing.WAITING, 5, 0.0)}

    def does(self, worker, doing, iteration):
        self.others[worker] = (doing, iteration, self.now)

    def goes_on(self):
        """Its wait ends, and another one begins."""
        own = Seen(doing=Doing.COMPUTING, iteration=5, seconds=0.0)
        assert self.lookout.look(own, self.now, stopped=(), pulses=None) is None
        self.waits_since = self.now

    def during(self, seconds, *, silent=(), stopped=(), doing=Doing.WAITING, answers=True, step=STEP):
        """The first sentence within these seconds, and how long it took; None if there is none."""
        begin = self.now
        while self.now < begin + seconds:
            self.now += step
            said = self.look(silent, stopped, doing, answers)
            if said is not None:
                return said, self.now - begin
        return None

    def look(self, silent, stopped, doing, answers):
        own = Seen(doing=doing, iteration=5, seconds=self.now - self.waits_since)
        pulses = {
            worker: Pulse(
                beats=-1 if worker in silent else round(self.now / STEP),
                seen=Seen(doing=each, iteration=iteration, seconds=self.now - since),
            )
            for worker, (each, iteration, since) in self.others.items()
        }
        return self.lookout.look(own, self.now, stopped=stopped, pulses=pulses if answers else None)


def test_a_stopped_process_is_named_once_this_worker_has_waited_for_the_limit():
    said, seconds = Waiting().during(60, stopped=[2], silent=[2])
    assert said.startswith("worker 2 stood still for 20 s, stopped by a signal such as SIGSTOP: ")
    assert SILENT < seconds < SILENT + 2 * STEP


def test_a_stopped_process_is_named_also_while_the_store_does_not_answer_and_this_worker_prepares_or_computes():
    for doing in (Doing.PREPARING, Doing.COMPUTING):
        assert Waiting().during(60, stopped=[1, 2], doing=doing, answers=False)[0].startswith("workers 1 and 2 stood")


def test_a_stopped_process_for_which_nobody_waits_is_left_alone():
    for doing in (Doing.STEPPED, Doing.LEFT, Doing.CHECKPOINTING, Doing.FETCHING):
        assert Waiting().during(1000, stopped=[2], silent=[2], doing=doing) is None


def test_a_process_that_goes_on_in_time_is_not_named_however_often_it_is_stopped():
    run = Waiting()
    for _ in range(10):
        assert run.during(SILENT - 1, stopped=[2], silent=[2]) is None
        assert run.during(2 * STEP) is None


def test_one_that_is_stopped_late_in_a_wait_has_the_whole_limit():
    run = Waiting()
    assert run.during(100) is None
    assert run.during(60, stopped=[2], silent=[2])[1] > SILENT


def test_a_worker_that_is_silent_but_not_stopped_may_hold_the_lock_of_python():
    assert Waiting().during(TIMEOUT, silent=[2]) is None


def test_a_machine_of_which_nothing_is_heard_while_all_others_wait_is_lost():
    said, seconds = Waiting(TWO).during(60, silent=[1, 2])
    assert said.startswith("workers 1 and 2 did not answer for 20 s, nor did any other process of the run on that")
    assert seconds < SILENT + 3 * STEP


def test_a_silent_worker_on_a_machine_whose_other_worker_is_heard_is_not_lost():
    assert Waiting(TWO).during(TIMEOUT, silent=[2]) is None


def test_silence_means_nothing_while_another_worker_computes_or_the_store_does_not_answer():
    run = Waiting(("a", "b", "a"))
    run.does(2, Doing.LEFT, 4)
    assert run.during(100, silent=[1]) is None
    assert Waiting(TWO).during(TIMEOUT, answers=False) is None


def test_a_worker_that_stood_still_itself_starts_over():
    run = Waiting()
    assert run.during(15, stopped=[1, 2], silent=[1, 2]) is None
    run.now += 1000  # All were suspended, and the others go on a little later.
    assert run.during(SILENT - 1, stopped=[1, 2], silent=[1, 2]) is None


def test_a_computation_is_not_late_since_all_workers_were_suspended():
    run = Waiting()
    run.does(1, Doing.COMPUTING, 5)
    assert run.during(15) is None
    run.now += 1000
    assert run.during(TIMEOUT / 2 - 1) is None


def test_a_worker_that_computes_for_longer_than_ever_is_named_at_half_of_the_timeout():
    run = Waiting()
    run.does(1, Doing.COMPUTING, 5)
    said, seconds = run.during(TIMEOUT)
    assert said.startswith("worker 1 has been outside the loader for 150 s, in iteration 5, while the others waited")
    assert TIMEOUT / 2 < seconds < TIMEOUT / 2 + 2 * STEP


def test_a_silent_worker_is_taken_to_do_what_it_did():
    run = Waiting()
    run.does(1, Doing.FETCHING, 5)
    assert run.during(1) is None
    assert run.during(TIMEOUT, silent=[1])[0].startswith("worker 1 has been waiting for the data of iteration 5 for 15")


def test_what_has_taken_long_before_may_take_five_times_as_long():
    run = Waiting()
    run.does(1, Doing.COMPUTING, 5)
    assert run.during(40) is None
    run.goes_on()
    run.does(1, Doing.COMPUTING, 5)
    assert 5 * 40 < run.during(TIMEOUT)[1] < 5 * 40 + 5 * 3 * STEP


def test_the_first_iteration_an_evaluation_and_the_first_checkpoint_have_the_whole_timeout():
    for doing, iteration in [
        (Doing.COMPUTING, 0),
        (Doing.PREPARING, -1),
        (Doing.STEPPED, 4),
        (Doing.LEFT, 4),
        (Doing.CHECKPOINTING, 4),
    ]:
        run = Waiting()
        run.does(1, doing, iteration)
        assert run.during(TIMEOUT - 1) is None


def test_a_later_checkpoint_is_measured_by_the_first():
    run = Waiting()
    run.does(1, Doing.CHECKPOINTING, 4)
    assert run.during(10) is None
    run.does(1, Doing.WAITING, 5)
    assert run.during(1) is None
    run.does(1, Doing.CHECKPOINTING, 4)
    assert run.during(TIMEOUT)[0].startswith("worker 1 has been in a checkpoint for 15")


def test_workers_that_weigh_by_units_beside_others_that_do_not_are_named_at_once():
    for most, odd, named in [
        (Doing.WAITING, Doing.COUNTING, "worker 2 weighs by 'units' where the others weigh by 'samples'"),
        (Doing.COUNTING, Doing.WAITING, "worker 2 weighs by 'samples' where the others weigh by 'units'"),
    ]:
        run = Waiting()
        run.does(1, most, 5)
        run.does(2, odd, 5)
        said, seconds = run.during(TIMEOUT, doing=most)
        assert said == f"{named}: call weigh_by on every worker or on none"
        assert seconds < SILENT / 2


def test_workers_that_wait_to_hear_what_others_have_read_are_named_where_these_wait_for_something_else():
    run = Waiting()
    run.does(2, Doing.HEARING, 5)
    said, seconds = run.during(TIMEOUT)
    assert said.startswith("worker 2 waits to hear what data the others have, which wait for something else: begin")
    assert seconds < SILENT / 2
    run = Waiting()
    run.does(1, Doing.HEARING, 5)
    assert run.during(TIMEOUT, doing=Doing.HEARING)[0].startswith("workers 0 and 1 wait to hear what data")
    run = Waiting()
    for worker in (1, 2):
        run.does(worker, Doing.HEARING, 6)  # Messages of iteration 5 may still be on their way here.
    assert run.during(TIMEOUT / 2) is None


def test_workers_that_may_go_on_do_not_weigh_apart():
    run = Waiting()
    run.does(1, Doing.COUNTING, 5)
    assert run.during(TIMEOUT, silent=[1]) is None  # It may hold the lock of Python.
    run.does(2, Doing.COMPUTING, 5)
    assert run.during(TIMEOUT / 4) is None
    for doing in (Doing.COUNTING, Doing.WAITING):
        for worker in (1, 2):
            run.does(worker, doing, 5)
        assert run.during(TIMEOUT, doing=doing) is None


def test_a_worker_that_comes_on_is_not_late():
    run = Waiting()
    for _ in range(10):
        run.does(1, Doing.COMPUTING, 5)
        assert run.during(TIMEOUT / 4) is None


def test_a_worker_is_not_late_while_another_is_not_waiting_either():
    run = Waiting()
    run.does(1, Doing.COMPUTING, 5)
    run.does(2, Doing.LEFT, 5)
    assert run.during(TIMEOUT - 1) is None


def after_failure(others, silent=()):
    """What worker 0, which waits in iteration 5, says of the others after a collective has failed."""
    lookout = Lookout(0, ONE, silent_seconds=SILENT, timeout_seconds=40.0)
    before = {worker: Pulse(beats=7, seen=seen) for worker, seen in others.items()}
    after = {worker: Pulse(beats=7 + (worker not in silent), seen=seen) for worker, seen in others.items()}
    return lookout.after_failure(Seen(doing=Doing.WAITING, iteration=5, seconds=12.0), before, after)


def does(doing, seconds=12.0):
    return Seen(doing=doing, iteration=5, seconds=seconds)


def test_after_a_failure_those_whose_pulse_stands_still_are_named():
    others = {1: does(Doing.COMPUTING), 2: does(Doing.WAITING)}
    assert after_failure(others, silent=[2]).startswith("worker 2 ended, died, stopped or did not answer within 40 s: ")
    assert after_failure(others, silent=[1, 2]).startswith("workers 1 and 2 ended, died, stopped")


def test_after_a_failure_one_that_has_come_less_far_for_long_is_named_and_otherwise_nobody():
    long, short = does(Doing.COMPUTING), does(Doing.COMPUTING, seconds=9.0)
    assert after_failure({1: does(Doing.WAITING), 2: long}).startswith("worker 2 has been outside the loader for 12 s")
    for other in (short, does(Doing.WAITING)):
        said = after_failure({1: does(Doing.WAITING), 2: other})
        assert said.startswith("a collective failed although every worker is alive")


def test_one_that_left_the_loop_alone_is_named_and_not_those_that_it_keeps_waiting():
    """As under FSDP: its next passes meet those of the others for a while."""
    computes = Seen(doing=Doing.COMPUTING, iteration=5, seconds=12.0)
    said = after_failure({1: computes, 2: replace(computes, left=4)})
    assert said.startswith(
        "worker 2 left the loop over the loader after iteration 4, and worker 1 did not: leave it on"
    )
    assert "left the loop over" not in after_failure({1: replace(computes, left=4), 2: replace(computes, left=4)})


def test_one_that_left_the_loop_within_an_iteration_is_named_and_not_its_peer_that_waits_for_it():
    """Worker 0 waits for the gradients of that iteration, and a peer of worker 2 in a collective of the script."""
    begins_anew = Seen(doing=Doing.WAITING, iteration=6, seconds=12.0, left=5)
    said = after_failure({1: Seen(doing=Doing.COMPUTING, iteration=5, seconds=100.0), 2: begins_anew})
    assert said.startswith("worker 2 left the loop over the loader after iteration 5, and worker 0 did not"), said
