"""Scripts that nobody here wrote: each habit, under each collective scheme, is the mathematics of one process."""

from functools import cache

import numpy as np
import pytest
from support import habits
from support.processes import results, run_workers
from support.training import Run

from evenstep.schemes import Scheme
from evenstep.testing.scripted import Scripted

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("habits")]

# 3 workers x 5 = 15 a slice: 5 whole slices, and a last one of 2 that leaves a worker with nothing.
RUN = Run(samples=77, epochs=2)
SCHEMES = {
    "bsp": {"scheme": "bsp"},
    "sizes that always change": {"scheme": Scheme(name="scripted", load=Scripted(seed=11))},
}


@pytest.fixture(scope="module")
def found():
    """What every habit came to under every scheme, on each worker, from one start of the workers."""
    every = [*habits.EXACT, *habits.ROUNDED, habits.normalise_and_report, *habits.MISTAKES]
    return results(run_workers(habits.together, habits.WORKERS, every, RUN, SCHEMES))


@cache
def alone(habit):
    return habits.alone(habit, RUN)


@pytest.mark.parametrize("habit", habits.EXACT, ids=lambda habit: habit.__name__)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_habit_is_the_mathematics_of_one_process(found, scheme, habit):
    values = [value[scheme, habit.__name__] for value in found]
    assert not [value for value in values if isinstance(value, str)]
    expected = alone(habit)
    for value in values:
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("habit", "tolerance"), habits.ROUNDED.items(), ids=lambda part: getattr(part, "__name__", ""))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_habit_that_rounds_is_one_process_within_that_and_alike_on_all_workers(found, scheme, habit, tolerance):
    values = [value[scheme, habit.__name__] for value in found]
    assert values[1:] == values[:1] * 2
    np.testing.assert_allclose(values[0], alone(habit), rtol=0, atol=tolerance)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_any_workers_checkpoint_of_batch_norm_is_that_of_all(found, scheme):
    first, *others = [value[scheme, "normalise_and_report"] for value in found]
    assert np.isfinite(first).all()
    assert others == [first, first]


@pytest.mark.parametrize(
    ("mistake", "sentence"), habits.MISTAKES.items(), ids=lambda part: getattr(part, "__name__", "")
)
def test_a_mistake_is_named_on_every_worker(found, mistake, sentence):
    for value in found:
        for scheme in SCHEMES:
            said = value[scheme, mistake.__name__]
            assert said.startswith(("ConfigError: ", "DisagreementError: worker 2 "))
            assert sentence in said
            if said.startswith("Disagreement"):
                assert said == found[0][scheme, mistake.__name__]
