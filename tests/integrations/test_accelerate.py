"""Scripts for Hugging Face Accelerate do the mathematics of one process, whatever the sizes of the workers are."""

from functools import cache

import numpy as np
import pytest

pytest.importorskip("accelerate", reason="needs Accelerate: pip install 'evenstep[accelerate]'")

from support import accelerate_habits as habits
from support import accelerate_scripts as scripts
from support.processes import results, run_workers
from support.training import Run

from evenstep.schemes import Scheme
from evenstep.testing.scripted import Scripted

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("accelerate")]

# 3 workers x 5 = 15 a slice: 5 whole slices, and a last one of 2 that leaves a worker with nothing.
RUN = Run(samples=77, epochs=2)
DIVISIBLE = Run(samples=75, epochs=2)
UNEVEN = "sizes that always change"
SCHEMES = {UNEVEN: {"scheme": Scheme(name="scripted", load=Scripted(seed=11))}}


def every(folder):
    """What every habit came to in one start of the workers: with uneven batches, with equal ones, and plainly."""
    exact = [*habits.EXACT, *habits.RESUMED, *habits.ROUNDED]
    more = [*scripts.EXACT, *scripts.MISTAKES, scripts.Saved(folder, continues=False)]
    return {
        "found": {
            **habits.together([*exact, *habits.MISTAKES, *more], RUN, SCHEMES),
            **habits.together(habits.MISTAKES_IN_EQUAL_STEPS, RUN, {"bsp": {"scheme": "bsp"}}),
        },
        "as plain": habits.together(habits.AS_PLAIN, DIVISIBLE, {"plain": None, **SCHEMES}),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("accelerate"))


@pytest.fixture(scope="module")
def came_to(folder):
    return results(run_workers(every, habits.WORKERS, folder))


@cache
def alone(habit):
    return habits.alone(habit, RUN)


def of_habit(came_to, scheme, habit):
    values = [each["found"][scheme, habit.__name__] for each in came_to]
    assert not [value for value in values if isinstance(value, str)]
    return values


@pytest.mark.parametrize("habit", habits.EXACT, ids=lambda habit: habit.__name__)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_habit_is_the_mathematics_of_one_process(came_to, scheme, habit):
    for value in of_habit(came_to, scheme, habit):
        np.testing.assert_allclose(value, alone(habit), rtol=0, atol=1e-10)


@pytest.mark.parametrize("habit", scripts.EXACT, ids=lambda habit: habit.__name__)
def test_a_script_is_the_mathematics_of_one_process(came_to, habit):
    for value in of_habit(came_to, UNEVEN, habit):
        np.testing.assert_allclose(value, alone(habit), rtol=0, atol=1e-10)


def test_another_number_of_workers_continues_from_a_checkpoint(came_to, folder):
    saves, continues = (scripts.Saved(folder, continues=each) for each in (False, True))
    assert of_habit(came_to, UNEVEN, saves) == [[]] * habits.WORKERS
    for found in results(run_workers(habits.together, 2, [continues], RUN, SCHEMES)):
        for value in found.values():
            assert not isinstance(value, str), value
            np.testing.assert_allclose(value, alone(habits.not_resumed), rtol=0, atol=1e-10)


@pytest.mark.parametrize("habit", habits.RESUMED, ids=lambda habit: habit.__name__)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_resumed_run_is_one_that_was_never_interrupted(came_to, scheme, habit):
    for value in of_habit(came_to, scheme, habit):
        np.testing.assert_allclose(value, alone(habits.not_resumed), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("habit", "tolerance"), habits.ROUNDED.items(), ids=lambda part: getattr(part, "__name__", ""))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_habit_that_rounds_is_one_process_within_that(came_to, scheme, habit, tolerance):
    values = of_habit(came_to, scheme, habit)
    assert values[1:] == values[:1] * 2
    np.testing.assert_allclose(values[0], alone(habit), rtol=0, atol=tolerance)


@pytest.mark.parametrize("habit", habits.AS_PLAIN, ids=lambda habit: habit.__name__)
def test_the_weights_are_those_of_plain_accelerate(came_to, habit):
    for each in came_to:
        plain, even = (each["as plain"][scheme, habit.__name__] for scheme in ("plain", UNEVEN))
        np.testing.assert_allclose(even, plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("mistake", "sentence"), habits.MISTAKES.items(), ids=lambda part: getattr(part, "__name__", "")
)
def test_a_mistake_is_named_on_every_worker(came_to, scheme, mistake, sentence):
    for each in came_to:
        said = each["found"][scheme, mistake.__name__]
        assert said.startswith("ConfigError: ")
        assert habits.MISTAKES[mistake] in said


@pytest.mark.parametrize("mistake", habits.MISTAKES_IN_EQUAL_STEPS, ids=lambda mistake: mistake.__name__)
def test_a_script_that_expects_equal_numbers_of_batches_is_refused(came_to, mistake):
    for each in came_to:
        said = each["found"]["bsp", mistake.__name__]
        assert said.startswith("ConfigError: ")
        assert habits.MISTAKES_IN_EQUAL_STEPS[mistake] in said


@pytest.mark.parametrize(
    ("mistake", "sentence"), scripts.MISTAKES.items(), ids=lambda part: getattr(part, "__name__", "")
)
def test_what_cannot_be_exact_is_refused_on_every_worker(came_to, mistake, sentence):
    for each in came_to:
        said = each["found"][UNEVEN, mistake.__name__]
        assert said.startswith("ConfigError: ")
        assert sentence in said
