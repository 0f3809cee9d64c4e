"""What a script changes on its loader between epochs is heeded as PyTorch does; what cuts by rank is refused."""

from itertools import chain

import pytest
import torch
from support import changing_loaders
from support.data_habits import Numbers
from support.processes import results, run_workers
from torch.utils.data import DataLoader

import evenstep

pytestmark = pytest.mark.xdist_group("data_habits")


@pytest.fixture(scope="module")
def found():
    return results(run_workers(changing_loaders.visit, changing_loaders.WORKERS))


@pytest.mark.parametrize("name", changing_loaders.changes())
def test_an_epoch_is_as_the_loader_is_then(found, name):
    loader, change, *held = changing_loaders.changes()[name]
    lengths = []
    for epoch, expected in enumerate(held):
        seen = [value[name][0][epoch] for value in found]
        assert sorted(chain.from_iterable(chain(*seen))) == sorted(expected)
        plain = DataLoader(range(len(expected)), changing_loaders.WORKERS * loader.batch_sampler.batch_size)
        assert {len(each) for each in seen} == {len(plain)}
        lengths.append(len(plain))
        change(loader)
    assert [value[name][1] for value in found] == [lengths] * changing_loaders.WORKERS


@pytest.mark.parametrize("name", changing_loaders.samplers_by_rank())
def test_samplers_that_differ_between_workers_are_refused(found, name):
    for value in found:
        assert "draws" in value[name] or "an epoch of 12 samples" in value[name]
        assert value[name] == found[0][name]


@pytest.mark.multiprocess
def test_a_dataset_that_grows_on_one_worker_alone_is_named():
    said = results(run_workers(changing_loaders.grow_apart, 2))
    assert (
        said
        == ["worker 1 has an epoch of 21 samples where worker 0 has 20: change the loader on every worker alike"] * 2
    )


@pytest.mark.parametrize(("name", "value"), changing_loaders.REFUSED_BY_TORCH.items())
def test_what_pytorch_does_not_let_be_set_is_refused_alike(name, value):
    plain = DataLoader(Numbers(5))
    with pytest.raises(ValueError, match=f"{name} attribute should not be set") as theirs:
        setattr(plain, name, value)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    *_, prepared = evenstep.prepare(model, optimizer, DataLoader(Numbers(5)), scheme="bsp")
    with prepared, pytest.raises(ValueError, match=name) as ours:
        setattr(prepared, name, value)
    assert str(ours.value) == str(theirs.value)
