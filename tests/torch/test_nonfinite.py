"""A NaN of one worker does not become that of all: its gradient, or its model, is left out and named."""

import numpy as np
import pytest
from support import nonfinite
from support.processes import results, run_workers

pytestmark = pytest.mark.multiprocess
WARNING = "worker 1 left out its gradient of iteration"


def trained(kind):
    return results(run_workers(nonfinite.together, nonfinite.WORKERS, kind))


@pytest.mark.parametrize("kind", ["summed", "weighed by units", "accumulated", "probed"])
def test_a_gradient_that_is_not_finite_is_left_out_and_named(kind):
    found = trained(kind)
    _, left_out, _, _ = found[nonfinite.BAD_WORKER]
    assert left_out
    expected = nonfinite.alone(left_out)
    for rank, ((weights, _), _, skipped, said) in enumerate(found):
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-12)
        assert skipped == len(said) == (rank == nonfinite.BAD_WORKER)
        assert all(WARNING in each for each in said)


def test_statistics_of_norms_are_those_of_the_others():
    found = trained("with norms")
    assert [skipped for _, _, skipped, _ in found] == [0, 1, 0]
    for came_to, *_ in found:
        assert came_to == found[0][0]
        assert all(np.isfinite(each).all() for part in came_to for each in part)


def test_a_model_that_is_not_finite_is_left_out_of_the_average():
    found = trained("averaged")
    assert [skipped for _, _, skipped, _ in found] == [0, 1, 0]
    for came_to, *_ in found:
        assert came_to == found[0][0]
        assert np.isfinite(came_to[0]).all()


def test_it_can_be_refused():
    said = [came_to for came_to, *_ in trained("refused")]
    assert "the gradient of iteration" in said[nonfinite.BAD_WORKER]
    assert "on worker 1 holds a NaN or an infinity" in said[nonfinite.BAD_WORKER]


def test_or_spread_as_under_distributed_data_parallel():
    for (weights, _), _, skipped, said in trained("spread"):
        assert np.isnan(weights).all()
        assert (skipped, said) == (0, [])


def test_models_that_are_all_not_finite_have_diverged():
    assert all("training has diverged by iteration" in came_to for came_to, *_ in trained("everywhere"))
