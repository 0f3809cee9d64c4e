"""A loss is trained as over the union batch, or refused: what stays silent would be wrong only with unlike sizes."""

import numpy as np
import pytest
from support import losses
from support.processes import results, run_workers

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("losses")]


@pytest.fixture(scope="module")
def found():
    return results(run_workers(losses.together, losses.WORKERS))


@pytest.mark.parametrize("name", losses.EXACT)
def test_a_loss_is_that_of_the_union_batch(found, name):
    _, options, union = losses.EXACT[name]
    expected = losses.alone(union, options.get("samples"))
    for each in found:
        weights, said = each[name]
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-11)
        assert said == []


@pytest.mark.parametrize("name", [*losses.REFUSED, *losses.WITHIN])
def test_a_loss_that_does_not_fall_as_batches_grow_is_refused_on_all_workers(found, name):
    sentences = {each[name][0] for each in found}
    assert len(sentences) == 1
    assert (
        "not the mean over the worker's own batch: in 20 iterations with batches such as [12, 9, 3]" in sentences.pop()
    )


@pytest.mark.parametrize("name", losses.WEIGHED)
def test_a_mean_over_weights_or_over_some_targets_is_refused_on_all_workers_without_weigh_by(found, name):
    sentences = {each[name][0] for each in found}
    assert len(sentences) == 1
    assert "not in proportion to samples: in 20 iterations with batches such as [12, 9, 3]" in sentences.pop()


def test_pytorch_has_its_own_losses_back_after_an_error_of_the_script(found):
    assert {each["an error of the script"][0] for each in found} == {"mine"}


@pytest.mark.parametrize("name", losses.GATHERED)
def test_a_gather_that_would_abort_is_refused(found, name):
    for each in found:
        assert "shape [12, 3] and [9, 3] and [3, 3]" in each[name][0]
        assert "use evenstep.torch.all_gather(tensor)" in each[name][0]


def test_rows_of_other_shapes_are_refused(found):
    for each in found:
        assert "workers gather rows of other shapes or dtypes" in each["a gather in other shapes"][0]


@pytest.mark.parametrize("name", losses.REFUSED)
def test_a_script_that_communicates_before_its_backward_is_told_of_weights_once(found, name):
    for each in found:
        told = [text for text in each[name][1] if 'give prepare(..., weights="script")' in text]
        assert len(told) == name.endswith("of all")


@pytest.mark.parametrize(
    ("how", "sentence"),
    [("zip", "rows that the prepared loader did not hand out"), ("views", None)],
)
def test_rows_of_another_loader_get_one_warning(how, sentence):
    # Worker 2 has 3 rows of 6 features, and could be given a batch the other way round.
    for said in results(run_workers(losses.rows_beside, losses.WORKERS, how))[:2]:
        assert {sentence in text for text in said} == ({True} if sentence else set())
        assert len(said) == 1 or how != "zip"


def test_a_mean_over_sorted_data_is_not_taken_for_a_sum():
    assert results(run_workers(losses.trained_on_sorted_data, losses.WORKERS)) == [None] * losses.WORKERS


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_runs_that_end_in_any_order_leave_pytorch_its_own_collectives(order):
    results(run_workers(losses.ended_in_order, 1, order))  # In a process that has no other runs.
