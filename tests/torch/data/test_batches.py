"""Batches as scripts make them: exact against one process, each sample once, and none that a loop cannot live with."""

from itertools import chain

import numpy as np
import pytest
import torch
from support import batch_habits
from support.processes import results, run_workers
from torch.utils.data import DataLoader, RandomSampler

import evenstep

pytestmark = pytest.mark.xdist_group("batches")

SLICE = 15  # 3 workers x 5.
NAMES = list(batch_habits.loaders())
CASES = [
    (scheme, name)
    for scheme in batch_habits.SCHEMES
    for name in NAMES
    if scheme == "sizes that always change" or not name.endswith("in processes")
]


@pytest.fixture(scope="module")
def found():
    """What every loader came to on each of three workers, from one start."""
    return results(run_workers(batch_habits.together, batch_habits.WORKERS))


def union(found, key):
    """The samples of every iteration over all workers, sorted."""
    seen = [each[key]["seen"] for each in found]
    return [[joined(parts) for parts in zip(*epochs, strict=True)] for epochs in zip(*seen, strict=True)]


def joined(parts):
    return sorted(chain.from_iterable(parts))


def slices(name):
    """The union batches of each epoch as the documentation says, or None if they are drawn at random."""
    if name.startswith("buckets"):
        lists = batch_habits.Buckets()
        epochs = []
        for epoch in range(batch_habits.EPOCHS):
            lists.set_epoch(epoch)
            epochs.append(lists.batches())
        return epochs
    if name == "a plain batch sampler":
        return [[list(range(start, start + SLICE)) for start in (0, 15, 30)]] * batch_habits.EPOCHS
    if name in ("copy", "shrink", "units"):
        orders = [torch.randperm(47, generator=torch.Generator().manual_seed(7 + epoch)) for epoch in range(2)]
        ends = {"copy": [15, 15, 15, 2], "shrink": [15, 15, 9, 8], "units": [6] * 7 + [5]}[name]
        return [[part.tolist() for part in order.split(ends)] for order in orders]
    return None


@pytest.mark.multiprocess
@pytest.mark.parametrize(("scheme", "name"), CASES)
def test_each_loader_trains_as_in_one_process(found, scheme, name):
    expected, handed = slices(name), union(found, (scheme, name))
    if expected is None:
        # Drawn in pieces: the samples are the same under all schemes, and the mathematics that of their slices.
        assert handed == union(found, ("bsp", name.removesuffix(" in processes")))
        assert {len(part) for epoch in handed for part in epoch} == {SLICE}
        expected = handed
    else:
        assert handed == [[sorted(part) for part in epoch] for epoch in expected]
    weights = batch_habits.alone(expected, weighed=name == "units")["weights"]
    for each in found:
        np.testing.assert_allclose(each[scheme, name]["weights"], weights, rtol=0, atol=1e-12)


@pytest.mark.multiprocess
@pytest.mark.parametrize(("scheme", "name"), CASES)
def test_the_length_is_known_and_no_batch_has_one_sample(found, scheme, name):
    iterations = 10**10 // SLICE + 1 if "without end" in name else len(slices(name)[0])
    for each in found:
        assert set(each[scheme, name]["lengths"]) == {iterations}
        assert min(given for _, given in each[scheme, name]["real"]) >= 2


@pytest.mark.multiprocess
@pytest.mark.parametrize("scheme", batch_habits.SCHEMES)
def test_where_the_epoch_shrinks_every_batch_is_of_samples_that_count(found, scheme):
    for each in found:
        assert all(own == given for own, given in each[scheme, "shrink"]["real"])
    assert any(own == 0 for each in found for own, _ in each[scheme, "copy"]["real"])


@pytest.mark.multiprocess
def test_permutations_are_drawn_one_after_another(found):
    first = [index for part in union(found, ("bsp", "permutations without end"))[0][:3] for index in part]
    assert len(set(first)) == len(first) == 45


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["buckets", "a length without end", "shrink"])
def test_an_epoch_goes_on_where_it_was_left(found, name):
    whole, resumed = (
        [joined(parts) for parts in zip(*(each["resumed"][name][at] for each in found), strict=True)] for at in (0, 1)
    )
    assert whole == resumed


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", batch_habits.refused())
def test_what_cannot_be_shared_out_is_refused_on_every_worker(found, name):
    for each in found:
        assert batch_habits.refused()[name][2] in each[name]


def prepare(loader, **options):
    model = torch.nn.Linear(4, 1, dtype=torch.float64)
    return evenstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, **options)[2]


def test_an_epoch_that_is_set_on_the_batch_sampler_counts():
    lists = batch_habits.Buckets()
    loader = prepare(DataLoader(batch_habits.Sentences(), batch_sampler=lists))
    lists.set_epoch(5)
    assert [batch[0].tolist() for batch in loader] == lists.batches()
    assert loader.epoch == 5  # Nothing was computed, so the epoch is not consumed.


def test_a_sampler_of_any_length_takes_the_memory_of_a_few_pieces():
    sampler = RandomSampler(range(5), replacement=True, num_samples=10**12)
    loader = prepare(DataLoader(batch_habits.Sentences(5), batch_size=2, sampler=sampler))
    loader.load_state_dict({**loader.state_dict(), "iteration": 10**11})
    drawn = [index for _, batch in zip(range(100), loader, strict=False) for index in batch[0].tolist()]
    assert set(drawn) == set(range(5))
    assert len(loader) == 10**12 // 2
