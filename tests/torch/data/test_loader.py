"""The loader as a user meets it, in one process."""

import copy
import weakref
from collections import OrderedDict

import numpy as np
import pytest
import torch
from support import training
from support.processes import CONTEXT
from support.training import Run
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset, WeightedRandomSampler

import evenstep
from evenstep import ConfigError


def loader_of(dataset, **options):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _, loader = evenstep.prepare(model, optimizer, DataLoader(dataset, **options))
    MODELS[loader] = model
    return loader


MODELS = weakref.WeakKeyDictionary()


def compute(loader):
    """A loop that computes nothing consumes no epoch."""
    MODELS[loader](torch.ones(1, 2)).sum().backward()


def numbers(loader):
    seen = []
    for batch in loader:
        compute(loader)
        seen.append(batch[0].flatten().tolist())
    return seen


COUNTED = TensorDataset(torch.arange(10.0))


def test_what_was_closed_is_refused_or_warned_about_and_ones_own_objects_can_be_prepared_again(recwarn):
    own = torch.nn.Linear(2, 1)
    optimizer, data = torch.optim.SGD(own.parameters(), lr=0.1), DataLoader(COUNTED, batch_size=4)
    model, _, loader = evenstep.prepare(own, optimizer, data)
    before = [each.detach().clone() for each in own.parameters()]
    loop = iter(loader)
    next(loop)
    loader.close()
    for again in (lambda: next(loop), lambda: next(iter(loader)), lambda: list(loader)):
        with pytest.raises(ConfigError, match=r"was closed: call prepare again, .* or loop over your own loader"):
            again()
    assert all(map(torch.equal, before, own.parameters()))
    with torch.no_grad():
        model(torch.ones(1, 2))
    model.eval()(torch.ones(1, 2))
    own.train()(torch.ones(1, 2))
    copy.deepcopy(model).train()(torch.ones(1, 2))
    assert not recwarn
    with pytest.warns(UserWarning, match="was closed, so evenstep no longer synchronises its gradients") as given:
        model.train()(torch.ones(1, 2))
    assert len(given) == 1
    model(torch.ones(1, 2))
    assert not recwarn
    model, _, loader = evenstep.prepare(own, optimizer, data)
    with loader:
        for _ in loader:
            model(torch.ones(1, 2)).sum().backward()
        assert loader.iteration == 3


def test_a_session_that_was_closed_before_its_start_does_not_start():
    session = evenstep.Session()
    model = session.model(torch.nn.Linear(2, 1))
    session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = session.loader(DataLoader(COUNTED, batch_size=4))
    session.close()
    for starts in (session.start, lambda: next(iter(loader))):
        with pytest.raises(ConfigError, match="was closed: call prepare again"):
            starts()


def test_a_session_without_a_model_or_an_optimizer_says_which():
    model = torch.nn.Linear(2, 1)
    for given in ("model", "optimizer"):
        session = evenstep.Session()
        session.model(model) if given == "model" else session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        missing = "optimizer" if given == "model" else "model"
        with pytest.raises(
            ConfigError, match=f"no {missing} was given: give yours to prepare, or to session.{missing}"
        ):
            next(iter(session.shares(8, 4)))


def test_in_order_without_shuffling():
    loader = loader_of(COUNTED, batch_size=4)
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(loader) == 3
    assert loader.dataset is COUNTED


def test_frameworks_do_not_take_it_for_a_loader_to_rebuild():
    """Accelerate and Lightning make another DataLoader of an instance's attributes, and leave other objects alone."""
    assert not isinstance(loader_of(COUNTED, batch_size=4), DataLoader)


def test_drop_last():
    loader = loader_of(COUNTED, batch_size=4, drop_last=True)
    assert numbers(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(loader) == 2


def test_lengths_and_sizes_are_known_before_the_workers_meet(monkeypatch):
    class Lists(list):
        batch_size = 4

    monkeypatch.setenv("WORLD_SIZE", "3")
    session = evenstep.Session()
    given = [
        session.loader(DataLoader(COUNTED, batch_size=1)),
        session.loader(DataLoader(COUNTED, batch_sampler=Lists([[0, 1, 2, 3], [4, 5]]))),
        session.shares(10, 4),
    ]
    assert [(len(each), each.global_batch_size) for each in given] == [(4, 3), (2, 4), (3, 4)]
    with pytest.raises(TypeError):
        len(session.shares(None, 4))
    for length, size in ((0, 4), (10, 0), (10.5, 4), (10, True)):
        with pytest.raises(ConfigError, match="must be a whole number from 1 to"):
            session.shares(length, size)


def test_shares_of_any_length_are_resumed_anywhere():
    model = torch.nn.Linear(2, 1)
    with evenstep.Session() as session:
        shares = session.shares(10**15, 4)
        model, optimizer = session.model(model), session.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        session.load_state_dict({**session.state_dict(), "iteration": 10**14, "looping": True})
        for share in shares:
            assert share.positions.dtype == np.int64
            assert share.positions.tolist() == list(range(4 * 10**14, 4 * 10**14 + 4))
            model(torch.ones(len(share.positions), 2)).sum().backward()
            optimizer.step()
            break
        assert shares.state_dict()["iteration"] == 10**14 + 1


def test_epochs_differ_and_set_epoch_repeats():
    loader = loader_of(COUNTED, batch_size=4, shuffle=True)
    first, second = numbers(loader), numbers(loader)
    assert first != second
    loader.set_epoch(0)
    assert numbers(loader) == first
    assert numbers(loader) == second


def test_an_epoch_that_was_set_on_the_sampler_before_prepare_is_the_first():
    def loader(epoch):
        sampler = DistributedSampler(COUNTED, num_replicas=1, rank=0)
        sampler.set_epoch(epoch)
        return loader_of(COUNTED, batch_size=4, sampler=sampler)

    counted, set_before = loader(0), loader(3)
    expected = [numbers(counted) for _ in range(5)][3:]
    assert (counted.epoch, set_before.epoch) == (5, 3)
    assert [numbers(set_before), numbers(set_before)] == expected


def test_leaving_an_epoch_early_begins_the_next():
    loader = loader_of(COUNTED, batch_size=4, shuffle=True)
    whole = [numbers(loader), numbers(loader)]
    loader.set_epoch(0)
    for _ in loader:
        compute(loader)
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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_that_is_loaded_within_a_loop_ends_the_loop(num_workers):
    loader = loader_of(COUNTED, batch_size=2, num_workers=num_workers)
    loop = iter(loader)
    next(loop)
    compute(loader)
    state = loader.state_dict()
    assert next(loop)[0].tolist() == [2, 3]
    compute(loader)
    loader.load_state_dict(state)
    with pytest.raises(ConfigError, match="a state was loaded, before this loop ended: leave the loop first"):
        next(loop)
    assert numbers(loader) == [[2, 3], [4, 5], [6, 7], [8, 9]]
    for _ in loader:
        compute(loader)
        loader.load_state_dict(state)
        break
    assert numbers(loader) == [[2, 3], [4, 5], [6, 7], [8, 9]]


def test_the_scripts_random_numbers_do_not_notice_data_workers():
    class Noisy(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.rand(2)

    torch.manual_seed(0)
    expected = torch.rand(4).tolist()
    loader = loader_of(Noisy(), batch_size=2, num_workers=2)
    torch.manual_seed(0)
    assert [torch.rand(1).item() for _ in loader] == expected


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
        return [str(numbers) for numbers, _ in loader_of(training.Numbered(23), batch_size=4, **options)]

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
