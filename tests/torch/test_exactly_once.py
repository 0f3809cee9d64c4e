"""Promise 2 for samples: every position of an epoch counts exactly once, whatever the sizes, processes and workers."""

import pytest
from support import training
from support.processes import results, run_workers
from support.training import Run

pytestmark = pytest.mark.multiprocess


def by_epoch(values):
    """Epoch -> all samples that any worker computed on, with weight."""
    seen = {}
    for value in values:
        for epoch, _, numbers, _, _ in value["visits"]:
            seen.setdefault(epoch, []).extend(numbers)
    return seen


@pytest.mark.parametrize(("num_workers", "collate"), [(0, None), (4, None), (2, training.as_lists)])
def test_each_sample_once_and_as_many_iterations_everywhere(num_workers, collate):
    run = Run(scripted=21, samples=83, epochs=2, num_workers=num_workers)
    values = results(run_workers(training.visit, 3, run, None, None, collate))
    assert {epoch: sorted(numbers) for epoch, numbers in by_epoch(values).items()} == {
        0: list(range(83)),
        1: list(range(83)),
    }
    assert [len(value["visits"]) for value in values] == [2 * values[0]["length"]] * 3
    if num_workers:
        assert sum(value["misses"] for value in values) > 0


def test_data_workers_draw_other_numbers_on_each_worker_and_in_each_epoch():
    run = Run(scripted=23, samples=83, epochs=2, num_workers=2)
    values = results(run_workers(training.visit, 3, run))
    drawn = [number for value in values for _, _, _, numbers, _ in value["visits"] for number in numbers]
    assert len(set(drawn)) == len(drawn) == 2 * 83


@pytest.mark.parametrize(("before", "after", "num_workers"), [(3, 2, 0), (2, 4, 4), (3, 1, 0)])
def test_resumed_in_mid_epoch_on_another_number_of_workers(before, after, num_workers):
    run = Run(scripted=24, samples=83, epochs=2, num_workers=num_workers, global_batch_size=12)
    first = results(run_workers(training.visit_until, before, run, 4))
    run = Run(scripted=25, samples=83, epochs=2, num_workers=num_workers, global_batch_size=12)
    if after == 1:
        second = [training.visit(run, None, first[0]["state"])]
    else:
        second = results(run_workers(training.visit, after, run, None, first[0]["state"]))
    seen = by_epoch([*first, *second])
    assert sorted(seen[0]) == list(range(83))
    assert sorted(seen[1]) == list(range(83))
