"""Batches that are fetched before the last one is computed have the weight of their own share, or are refused."""

from functools import cache

import numpy as np
import pytest
from support import ahead_habits, habits
from support.processes import results, run_workers
from support.training import Run

from evenstep.schemes import Scheme
from evenstep.testing.scripted import Scripted

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("habits")]

# 3 workers x 5 = 15 a slice. A last slice of 2 leaves a worker with nothing; copies of batches are told by lengths.
SHORT, WHOLE = Run(samples=77, epochs=2), Run(samples=75, epochs=2)
UNEVEN, IMPATIENT = "sizes that always change", "workers that wait for others for 20 s"
SCRIPTED = Scheme(name="scripted", load=Scripted(seed=11))
SCHEMES = {
    "bsp": {"scheme": "bsp"},
    UNEVEN: {"scheme": SCRIPTED},
    IMPATIENT: {"scheme": SCRIPTED, "timeout": 20.0},
    "local-sgd": {"scheme": "local-sgd:period=1"},
}
CASES = [
    *((UNEVEN, habit, SHORT) for habit in ahead_habits.EXACT),
    *((UNEVEN, habit, WHOLE) for habit in ahead_habits.MOVED),
    *(("local-sgd", habit, SHORT) for habit in (*ahead_habits.IN_ORDER, habits.step_with_a_closure)),
]
UNCERTAIN = [(scheme, habit, SHORT) for scheme in ("bsp", UNEVEN) for habit in ahead_habits.UNCERTAIN]
MISTAKES = {
    ahead_habits.go_backward_late: "the backward of a batch came after the next batch had begun",
    ahead_habits.pad_and_tell_nothing: "call loader.computes(batch) before its first forward pass",
    ahead_habits.pad_and_tell_the_first: "call loader.computes(batch) before its first forward pass",
    ahead_habits.cut_the_batches: "call loader.computes(batch) before its first forward pass",
    ahead_habits.go_backwards: "compute each batch before the next one begins",
    ahead_habits.compute_windows_twice: "compute each batch before the next one begins",
    ahead_habits.compute_windows_twice_on_a_device: "compute each batch before the next one begins",
    ahead_habits.go_backwards_with_a_mask: "compute each batch before the next one begins",
    ahead_habits.compute_the_last_one_again: "compute each batch before the next one begins",
    ahead_habits.differentiate_by_hand: "were not summed over the workers",
    ahead_habits.leave_out_a_step: "optimizer steps",
    ahead_habits.loop_in_a_thread: "looped over in another thread",
    ahead_habits.keep_the_batches: "compute each batch before the next one begins",
    ahead_habits.keep_the_batches_on_a_device: "steps on a batch after the loop over the prepared loader has ended",
    ahead_habits.tell_another_tensor: "computes takes a batch as the loader handed it out",
}


def run_all(cases, schemes):
    """By scheme and habit, what it comes to on this worker."""
    return {(scheme, habit.__name__): habits.attempt(habit, run, schemes[scheme]) for scheme, habit, run in cases}


@pytest.fixture(scope="module")
def found():
    mistakes = [(IMPATIENT, habit, SHORT) for habit in MISTAKES]
    return results(run_workers(run_all, habits.WORKERS, CASES + UNCERTAIN + mistakes, SCHEMES))


@cache
def alone(habit, samples):
    return habits.alone(habit, Run(samples=samples, epochs=2))


@pytest.mark.parametrize(("scheme", "habit", "run"), CASES, ids=lambda part: getattr(part, "__name__", part))
def test_it_is_the_mathematics_of_one_process(found, scheme, habit, run):
    for value in found:
        came_to = value[scheme, habit.__name__]
        assert not isinstance(came_to, str), came_to
        np.testing.assert_allclose(came_to, alone(habit, run.samples), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("scheme", "habit", "run"), UNCERTAIN, ids=lambda part: getattr(part, "__name__", part))
def test_what_a_worker_cannot_tell_is_exact_or_an_error(found, scheme, habit, run):
    came_to = [value[scheme, habit.__name__] for value in found]
    if not any(isinstance(each, str) for each in came_to):
        np.testing.assert_allclose(came_to, [alone(habit, run.samples)] * len(came_to), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("mistake", "sentence"), MISTAKES.items(), ids=lambda part: getattr(part, "__name__", ""))
def test_what_would_be_weighed_wrongly_is_refused(found, mistake, sentence):
    said = [value[IMPATIENT, mistake.__name__] for value in found]
    assert all(isinstance(each, str) for each in said)
    assert any(sentence in each for each in said), said
