"""The loader as a user meets it, in one process."""

import copy
from collections import OrderedDict

import pytest
import torch
from support import training
from support.processes import CONTEXT
from support.training import Run
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

import evenstep
from evenstep import ConfigError


def loader_of(dataset, **options):
    model = torch.nn.Linear(2, 1)
    return evenstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(dataset, **options))[2]


def numbers(loader):
    return [batch[0].flatten().tolist() for batch in loader]


COUNTED = TensorDataset(torch.arange(10.0))


def test_in_order_without_shuffling():
    loader = loader_of(COUNTED, batch_size=4)
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(loader) == 3
    assert loader.dataset is COUNTED


def test_drop_last():
    loader = loader_of(COUNTED, batch_size=4, drop_last=True)
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(loader) == 2


def test_epochs_differ_and_set_epoch_repeats():
    loader = loader_of(COUNTED, batch_size=4, shuffle=True)
    first, second = numbers(loader), numbers(loader)
    assert first != second
    loader.set_epoch(0)
    assert numbers(loader) == first
    assert numbers(loader) == second


def test_leaving_an_epoch_early_begins_the_next():
    loader = loader_of(COUNTED, batch_size=4, shuffle=True)
    whole = [numbers(loader), numbers(loader)]
    loader.set_epoch(0)
    for _ in loader:
        break
    assert numbers(loader) == whole[1]


def test_a_users_sampler_is_drawn_anew_each_epoch_and_kept_across_a_resume():
    def fresh():
        generator = torch.Generator().manual_seed(5)
        return loader_of(COUNTED, batch_size=4, sampler=WeightedRandomSampler(torch.ones(10), 10, generator=generator))

    loader = fresh()
    whole = [numbers(loader), numbers(loader)]
    assert whole[0] != whole[1]
    loader = fresh()
    begun = []
    for (batch,) in loader:
        begun.append(batch.tolist())
        if len(begun) == 2:
            break
    state = loader.state_dict()
    resumed = fresh()
    resumed.load_state_dict(state)
    assert begun + numbers(resumed) == whole[0]


def test_the_scripts_random_numbers_do_not_notice_the_loader():
    class Noisy(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.rand(2)

    torch.manual_seed(0)
    expected = torch.rand(4).tolist()
    for num_workers in (0, 2):
        loader = loader_of(Noisy(), batch_size=2, num_workers=num_workers)
        torch.manual_seed(0)
        found = [torch.rand(1).item() for _ in loader]
        assert found == expected


def test_structures_survive_the_chunks():
    class Structured(Dataset):
        def __len__(self):
            return 9

        def __getitem__(self, index):
            pair = (torch.tensor([index]), index, "q")
            return OrderedDict(pair=pair, name=f"n{index}", list=[float(index)])

    inline = list(loader_of(Structured(), batch_size=4))
    fetched = list(loader_of(Structured(), batch_size=4, num_workers=2))
    assert str(fetched) == str(inline)
    assert inline[0]["name"] == ["n0", "n1", "n2", "n3"]


def test_worker_processes_of_a_fork_server_fetch_the_same():
    def fetched(**options):
        return [str(batch) for batch in loader_of(training.Numbered(23), batch_size=4, **options)]

    assert fetched(num_workers=2, multiprocessing_context=CONTEXT) == fetched()


def test_two_loops_at_once_are_refused():
    for num_workers in (0, 2):
        loader = loader_of(COUNTED, batch_size=4, num_workers=num_workers)
        outer = iter(loader)
        next(outer)
        assert len(numbers(loader)) == 3
        with pytest.raises(evenstep.ConfigError, match="another loop"):
            next(outer)


def test_a_copy_of_a_prepared_model_is_the_users_model_alone():
    model, _, _ = training.prepared(Run(batch_size=4))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    inputs = torch.randn(3, training.FEATURES, dtype=torch.float64)
    assert torch.equal(averaged(inputs), model(inputs))
    assert list(copy.deepcopy(model).state_dict()) == list(model.state_dict())


def test_worker_init_fn_finds_the_users_dataset():
    loader = loader_of(Opened(), batch_size=3, num_workers=2, worker_init_fn=open_dataset, persistent_workers=True)
    assert numbers(loader) == [[0, 1, 2], [3, 4, 5]]
    assert numbers(loader) == [[0, 1, 2], [3, 4, 5]]


class Opened(Dataset):
    handle = None

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return (torch.tensor([self.handle[index]]),)


def open_dataset(_):
    torch.utils.data.get_worker_info().dataset.handle = list(range(6))


def test_the_state_is_plain_and_complete():
    import json

    run = Run(samples=20, batch_size=4, epochs=1)
    model, optimizer, loader = training.prepared(run)
    for inputs, targets in loader:
        training.step(model, optimizer, inputs, targets)
    state = json.loads(json.dumps(loader.state_dict()))
    loader.load_state_dict(state)
    assert json.loads(json.dumps(loader.state_dict())) == state
    assert [len(batch[0]) for batch in loader] == [4, 4, 4, 4, 4]
    assert loader.state_dict()["epoch"] == 1


def test_tensors_are_collated_as_by_default_collate():
    dataset = torch.utils.data.Subset(TensorDataset(torch.randn(9, 2), torch.arange(9)), [8, 1, 3, 0])
    ours = list(loader_of(dataset, batch_size=3))
    usual = list(DataLoader(dataset, batch_size=3))
    assert str(ours) == str(usual)


def test_a_mean_over_a_single_worker_is_its_own():
    loader = loader_of(COUNTED, batch_size=4)
    assert loader.mean_over_workers(0.1, 3) == 0.1
    assert loader.mean_over_workers(3, 2) == 3.0
    half = loader.mean_over_workers(torch.tensor([0.5, 0.25], dtype=torch.float16), 8)
    assert torch.equal(half, torch.tensor([0.5, 0.25], dtype=torch.float16))
    assert loader.mean_over_workers(torch.tensor(7), 2).dtype == torch.float32
    with pytest.raises(ConfigError, match="counted nothing"):
        loader.mean_over_workers(0.5, 0)
