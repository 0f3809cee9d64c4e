"""Trainers of TRL that are attached do the mathematics of one process."""

import numpy as np
import pytest

pytest.importorskip("trl", reason="needs TRL: pip install 'evenstep[trl]'")

from support import trl_habits as habits
from support.processes import results, run_workers

from evenstep.schemes import Scheme
from evenstep.testing.scripted import Scripted

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("transformers")]

UNEVEN = "sizes that always change"


@pytest.fixture(scope="module")
def came_to():
    """What every habit came to on each worker, from one start of the workers."""
    schemes = {UNEVEN: {"scheme": Scheme(name="scripted", load=Scripted(seed=11))}}
    return results(run_workers(habits.every, habits.WORKERS, schemes))


@pytest.mark.parametrize("habit", habits.ATTACHED, ids=lambda habit: habit.__name__)
def test_an_attached_trainer_is_one_process(came_to, habit):
    alone = came_to[0]["alone", habit.__name__]
    assert not isinstance(alone, str), alone
    for each in came_to:
        value = each[UNEVEN, habit.__name__]
        assert not isinstance(value, str), value
        np.testing.assert_allclose(value["weights"], alone["weights"], rtol=0, atol=1e-6)
        assert habit is not habits.fine_tune_in_whole_batches or value["tokens"] == alone["tokens"]


@pytest.mark.parametrize("mistake", habits.MISTAKES, ids=lambda mistake: mistake.__name__)
def test_what_cannot_work_is_refused(came_to, mistake):
    for each in came_to:
        said = each[UNEVEN, mistake.__name__]
        assert said.startswith("ConfigError: ")
        assert habits.MISTAKES[mistake] in said
