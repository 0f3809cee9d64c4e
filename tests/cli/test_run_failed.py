import pytest

from evenstep.core.ending import Ending
from evenstep.launch.run_failed import failure_of

LOST = "WorkerLostError: worker 7 died"


def ends(*known):
    """The ends of workers 0, 1, ... with these exit codes and errors, one after another; None: it is not known."""
    return [
        Ending(worker=worker, exit_code=end[0], message=end[1], at_seconds=float(worker), asked_to_end=len(end) > 2)
        for worker, end in enumerate(known)
        if end is not None
    ]


@pytest.mark.parametrize(
    ("known", "worker", "exit_code", "text"),
    [
        ([(-9, "")], 0, 137, "worker 0 was killed by SIGKILL, which is what a system out of memory does"),
        ([(-15, "", "asked"), (3, "")], 1, 3, "worker 1 ended with exit code 3: its own output above tells why"),
        ([(1, LOST), (1, "")], 1, 1, "worker 1 ended with exit code 1"),
        ([(1, ""), (-9, "")], 1, 137, "worker 1 was killed by SIGKILL"),
        ([(1, LOST), (-15, "", "asked")], 0, 1, "worker 0 ended with exit code 1: worker 7 died"),
        ([(1, "ConfigError: too small: raise it"), (1, "ConfigError: x")], 0, 1, "exit code 1: too small: raise it"),
        ([(1, "it: broke")], 0, 1, "worker 0 ended with exit code 1: it: broke"),
        # It had stopped, was missed, and only then killed by the launcher.
        ([(1, LOST), (-9, "", "asked")], 0, 1, "worker 7 died"),
        ([(0, ""), (1, LOST)], 1, 1, "worker 7 died; worker 0 had ended with exit code 0"),
    ],
)
def test_names_the_worker_that_failed_first_and_how(known, worker, exit_code, text):
    failure = failure_of(ends(*known), {})
    assert failure.worker == worker
    assert failure.exit_code == exit_code
    assert text in str(failure)
    assert "\n" not in str(failure)


def test_a_keeper_that_was_killed_is_named_as_what_it_is():
    failure = failure_of(ends((1, LOST), None), {1: 9})
    text = "the keeper of worker 1 was killed by SIGKILL, and the worker with it; the others were stopped"
    assert (str(failure), failure.worker, failure.exit_code) == (text, 1, 137)
