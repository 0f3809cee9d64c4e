"""Trainers of Hugging Face Transformers do the mathematics of one process, whatever the sizes of the workers are."""

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs Transformers: pip install 'evenstep[transformers]'")

from support import transformers_habits as habits
from support import transformers_scripts as scripts
from support.processes import results, run_workers

from evenstep.schemes import Scheme
from evenstep.testing.scripted import Scripted

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("transformers")]

SCHEMES = {"sizes that always change": {"scheme": Scheme(name="scripted", load=Scripted(seed=11))}}


@pytest.fixture(scope="module")
def came_to():
    """What every habit came to on each worker, from one start of the workers."""
    return results(run_workers(habits.every, habits.WORKERS, SCHEMES, scripts.EXACT))


def require_alike(value, alone, tolerance=1e-10):
    assert not isinstance(alone, str), alone
    assert not isinstance(value, str), value
    np.testing.assert_allclose(value["weights"], alone["weights"], rtol=0, atol=tolerance)
    np.testing.assert_allclose(value["losses"], alone["losses"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("habit", [*habits.EXACT, *scripts.EXACT], ids=lambda habit: habit.__name__)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_habit_is_the_mathematics_of_one_process(came_to, scheme, habit):
    for each in came_to:
        require_alike(each[scheme, habit.__name__], came_to[0]["alone", habit.__name__])


@pytest.mark.parametrize(("habit", "tolerance"), habits.ROUNDED.items(), ids=lambda part: getattr(part, "__name__", ""))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_habit_that_rounds_is_one_process_within_that(came_to, scheme, habit, tolerance):
    for each in came_to:
        require_alike(each[scheme, habit.__name__], came_to[0]["alone", habit.__name__], tolerance)


def test_a_run_with_a_slow_worker_is_the_mathematics_of_one_process(came_to):
    for each in came_to:
        require_alike(each["slow", "accumulate"], came_to[0]["alone", "accumulate"])


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("mistake", habits.MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_named_on_every_worker(came_to, scheme, mistake):
    for each in came_to:
        said = each[scheme, mistake.__name__]
        assert said.startswith(("ConfigError: ", "DisagreementError: "))
        assert habits.MISTAKES[mistake] in said
