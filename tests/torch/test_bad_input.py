"""Each mistake gets one sentence that says what to change."""

import copy
import math
from datetime import timedelta

import numpy as np
import pytest
import torch
from support import faults, training
from support.processes import results, run_workers
from support.training import Run
from torch.distributed import TCPStore
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
)

import evenstep
from evenstep import ConfigError
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.torch.data.order import EpochOrder
from evenstep.torch.refusals import require_private_possible
from evenstep.torch.request import RunRequest
from evenstep.torch.survey import to_be_surveyed


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(1)


def parts():
    model = torch.nn.Linear(2, 1)
    dataset = TensorDataset(torch.zeros(20, 2), torch.zeros(20, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(dataset, batch_size=4)


def refusal(model=None, optimizer=None, loader=None, **options):
    """The sentence with which `prepare` refuses these arguments."""
    usual = parts()
    if model is not None and optimizer is None and any(p.requires_grad for p in model.parameters()):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError) as caught:
        evenstep.prepare(
            usual[0] if model is None else model,
            usual[1] if optimizer is None else optimizer,
            usual[2] if loader is None else loader,
            **options,
        )
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"scheme": "lbbsp"}, "no scheme 'lbbsp': did you mean 'lb-bsp'?"),
        ({"scheme": "lb-bsp:predicter=ema"}, "no parameter 'predicter': did you mean 'predictor'?"),
        ({"scheme": "lb-bsp:predictor=emma"}, "emma"),
        ({"scheme": "lb-bsp:multiple=eight"}, "whole number, not 'eight'"),
        ({"scheme": "lb-bsp:multiple"}, "has no value"),
        ({"scheme": "lb-bsp:multiple=3"}, "multiple"),
        ({"scheme": "bsp:multiple=3"}, "no parameter 'multiple': choose one of 'micro_batch'"),
        ({"timeout": 10**400}, "timeout must be a positive number of seconds"),
        ({"scheme": 3}, "scheme must be a scheme string such as 'lb-bsp', or what a recipe such as"),
        ({"scheme": ["asp"]}, "evenstep.schemes.lb_bsp() returns, not ['asp']"),
        ({"scheme": evenstep.schemes.ssp}, "returns, not function"),
        ({"global_batch_size": 0}, "global_batch_size must be a whole number of samples from 1 to 2147483647, not 0"),
        ({"global_batch_size": True}, "whole number of samples from 1 to 2147483647, not True"),
        ({"global_batch_size": 2.5}, "whole number of samples from 1 to 2147483647, not 2.5"),
        ({"global_batch_size": 10**30}, "whole number of samples from 1 to 2147483647, not 1000"),
        ({"batch_sizes": "44"}, "batch_sizes must be a list of batch sizes, one per worker, or a mapping"),
        ({"batch_sizes": 4}, "batch_sizes must be a list of batch sizes, one per worker, or a mapping"),
        ({"batch_sizes": ["4"]}, "batch size of worker 0 must be a whole number from 1 to 2147483647, not '4'"),
        ({"batch_sizes": [4, 4]}, "there are sizes for 2 workers, and the run has 1: give one for each"),
        ({"batch_sizes": [4], "global_batch_size": 5}, "[4] add up to 4, not to the global batch size 5"),
        ({"batch_sizes": {"rank:1": 4}}, "'rank:1', which matches no worker: did you mean 'rank:0'?"),
        ({"batch_sizes": {"node:a": 4}}, "write rank:NUMBER, host:NAME or gpu:NAME"),
        ({"batch_sizes": {"rank:0": 0}}, "the batch size of rank:0 must be a whole number from 1 to 2147483647, not 0"),
        ({"batch_sizes": {}}, "there is no batch size of worker 0: add a key such as 'host:"),
        ({"batch_sizes": [4], "scheme": "lb-bsp"}, "give one of them"),
        ({"scheme": "static:4/4"}, "there are sizes for 2 workers, and the run has 1: give one for each"),
        ({"scheme": "static:4", "global_batch_size": 5}, "[4] add up to 4, not to the global batch size 5"),
        ({"timeout": 0}, "timeout must be a positive number of seconds, at most 1e+09, not 0"),
        ({"timeout": "5"}, "positive number of seconds, at most 1e+09, not '5'"),
        ({"timeout": float("nan")}, "positive number of seconds, at most 1e+09, not nan"),
        ({"timeout": 1e300}, "positive number of seconds, at most 1e+09, not 1e+300"),
        ({"run_dir": 7}, "run_dir must be the path of a folder, not 7"),
        ({"run_dir": ""}, "run_dir must be the path of a folder, not ''"),
        ({"run_dir": "x" * 300}, "cannot be written (File name too long): give another"),
        ({"seed": "abc"}, "seed must be a whole number of at most 64 bits, not 'abc'"),
        ({"seed": 2**70}, "seed must be a whole number of at most 64 bits, not 1180591620717411303424"),
        ({"comm_hook": "x"}, "comm_hook must be a tuple of a state and a function, not 'x'"),
        ({"schedulers": [1]}, "schedulers must be a scheduler of torch.optim.lr_scheduler, or a list of them, not 1"),
        ({"emulate": 5}, "emulate must be a Cluster, or the path of a cluster file, not 5"),
    ],
)
def test_options(options, fragment):
    assert fragment in refusal(**options)


@pytest.mark.parametrize(
    ("loader", "fragment"),
    [
        ([1, 2], "must be a torch DataLoader, not list"),
        (DataLoader(range(9), batch_size=None), "batch_sampler"),
        (DataLoader(range(3), batch_size=9, drop_last=True), "drop_last leaves nothing of 3 samples"),
        (DataLoader(range(9), sampler=DistributedSampler(range(9), 2, 0)), "made for 2 workers but there are 1"),
    ],
)
def test_loaders(loader, fragment):
    assert fragment in refusal(loader=loader)


def test_streams():
    stream = DataLoader(Endless(), batch_size=4)
    assert "evenstep.ShardedDataset" in refusal(loader=stream, partition="common")
    request = RunRequest.of(LaunchSettings(), scheme="asp").of_parts(stream, None)
    with pytest.raises(ConfigError, match="'asp' shares them out by iteration: use lb-bsp, dbs, bsp"):
        require_private_possible(request, request.asked_scheme(), EpochOrder.__new__(EpochOrder))
    with pytest.raises(ConfigError, match="evenstep plan repeats the samples of a dataset that all workers have"):
        to_be_surveyed(request)


def test_models():
    frozen = torch.nn.Linear(2, 1).requires_grad_(False)
    assert "nothing to train" in refusal(model=frozen, optimizer=parts()[1])
    assert "one process per device" in refusal(model=torch.nn.DataParallel(torch.nn.Linear(2, 1)))
    assert "build it from model.parameters()" in refusal(optimizer=torch.optim.SGD([torch.zeros(1)], lr=1))
    assert "must be a torch.optim.Optimizer, or a tuple of them, not object" in refusal(optimizer=object())
    assert "no optimizer was given: give yours to prepare, or to session.optimizer" in refusal(optimizer=())
    usual = parts()
    assert "no model was given: give yours to prepare, or to session.model" in refusal(model=(), optimizer=parts()[1])
    for models in ([usual[0]], "model"):
        with pytest.raises(ConfigError, match=r"model must be a torch.nn.Module, or a tuple of them, not "):
            evenstep.prepare(models, usual[1], usual[2])


def test_an_argument_that_there_is_not_is_refused_with_the_nearest_one():
    with pytest.raises(TypeError, match=r"^Session has no argument 'batch_size': did you mean 'batch_sizes'\?$"):
        evenstep.Session(batch_size=4)


def test_integers_of_numpy_are_whole_numbers():
    _, _, loader = evenstep.prepare(*parts(), batch_sizes=np.array([4]), seed=np.int64(3))
    assert loader.batch_sizes == [4]
    _, _, loader = evenstep.prepare(*parts(), global_batch_size=np.int32(5))
    assert len(loader) == 4


@pytest.mark.parametrize(
    ("call", "fragment"),
    [
        (lambda loader: loader.note(loss="low"), "note takes numbers and tensors of one element, not 'low' for 'loss'"),
        (lambda loader: loader.note(loss=torch.zeros(2)), "not Tensor for 'loss'"),
        (lambda loader: loader.mean_over_workers("a", 1), "takes a number or a tensor, and its count, not 'a' and 1"),
        (lambda loader: loader.mean_over_workers(1.0, 10**400), "not 1.0 and a number of more than"),
        (lambda loader: loader.mean_over_workers(torch.tensor(1j), 1), "takes real values"),
    ],
)
def test_what_is_measured_must_be_numbers(call, fragment):
    with pytest.raises(ConfigError) as refused:
        call(evenstep.prepare(*parts())[2])
    assert fragment in str(refused.value)


def test_a_global_batch_of_more_than_the_dataset_is_warned_of():
    with pytest.warns(UserWarning, match="global batch size 21 is more than the 20 samples of an epoch"):
        evenstep.prepare(*parts(), global_batch_size=21)
    evenstep.prepare(*parts(), global_batch_size=20)


def test_preparing_twice():
    model, optimizer, loader = parts()
    prepared, _, prepared_loader = evenstep.prepare(model, optimizer, loader)
    assert "prepared already" in refusal(model=model, optimizer=optimizer)
    assert "prepared already" in refusal(model=prepared, optimizer=optimizer)
    assert "loader was prepared already" in refusal(loader=prepared_loader)
    again = copy.deepcopy(model)  # a copy is a model of its own
    evenstep.prepare(again, torch.optim.SGD(again.parameters(), lr=0.1), parts()[2])


def test_a_hook_on_the_prepared_model():
    model, _, _ = evenstep.prepare(*parts())
    with pytest.raises(ConfigError, match="comm_hook="):
        model.register_comm_hook(None, None)


def test_an_attribute_of_the_users_own_model():
    model = torch.nn.Linear(2, 1)
    model.generate = lambda: "text"
    prepared, _, _ = evenstep.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), parts()[2])
    assert prepared.module.generate() == "text"
    with pytest.raises(AttributeError, match=r"write model\.module\.generate"):
        _ = prepared.generate
    with pytest.raises(AttributeError, match="no attribute 'generation'"):
        _ = prepared.generation
    assert not hasattr(prepared, "generate")


def test_weigh_by():
    _, _, loader = evenstep.prepare(*parts())
    with pytest.raises(ConfigError, match="inside the loop"):
        loader.weigh_by(3)
    for _ in loader:
        for count in (-1, math.nan, math.inf, 10**400, "3", None, [1], torch.ones(2)):
            with pytest.raises(ConfigError, match="weigh_by takes a number of units"):
                loader.weigh_by(count)
        for count in (3, 3.5, np.int64(3), torch.tensor(3.5)):
            loader.weigh_by(count)
        break


@pytest.mark.parametrize("epoch", ["a", None, 1.5, -1, 2**70, True])
def test_epochs(epoch):
    model, optimizer, loader = parts()
    _, _, prepared = evenstep.prepare(model, optimizer, loader)
    with pytest.raises(ConfigError, match="epoch must be a whole number from 0 to 2147483647, not "):
        prepared.set_epoch(epoch)
    assert prepared.epoch == 0


def test_loader_states():
    _, _, loader = evenstep.prepare(*parts())
    state = loader.state_dict()
    with pytest.raises(ConfigError, match="version"):
        loader.load_state_dict({**state, "version": 2})
    for wrong in (None, [], "state"):
        with pytest.raises(ConfigError, match="a loader goes on from what its state_dict"):
            loader.load_state_dict(wrong)
    damages = [
        {"epoch": "a"},
        {"seed": None},
        {"seed": 2**70},
        {"global_batch_size": 0},
        {"iteration": -1},
        {"load": 3},
    ]
    for damage in damages:
        with pytest.raises(ConfigError, match=f"this loader state is damaged \\({next(iter(damage))} is "):
            loader.load_state_dict({**state, **damage})
    with pytest.raises(ConfigError, match="an order of 2 for 20 samples"):
        loader.load_state_dict({**state, "order": [1, 2]})
    with pytest.raises(ConfigError, match="what this loader state says of sizes and speeds is damaged"):
        loader.load_state_dict({**state, "load": {**state["load"], "policy": None}})
    with pytest.raises(ConfigError, match="resume with the dataset"):
        loader.load_state_dict({**state, "length": 21})
    with pytest.warns(UserWarning, match="global batch size 5 replaces 4"):
        loader.load_state_dict({**state, "global_batch_size": 5})
    assert len(loader) == 4


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"global_batch_size": 2}, "global batch size 2 is less than 3 workers"),
        ({"batch_sizes": {0: 3, 1: 3}}, "there is no batch size of worker 2"),
        ({"batch_sizes": {"host:nowhere": 3}}, "matches no worker"),
    ],
)
def test_several_workers(options, fragment):
    run = Run(options={key: value for key, value in options.items() if key != "global_batch_size"})
    run.global_batch_size = options.get("global_batch_size")
    for outcome in run_workers(training.train, 3, run):
        assert outcome.error.startswith("ConfigError: ")
        assert fragment in outcome.error


MISTAKES = [
    ({"scheme": 3}, "scheme must be a scheme string"),
    ({"timeout": "5"}, "timeout must be a positive number of seconds"),
    ({"run_dir": 7}, "run_dir must be the path of a folder"),
    ({"seed": 2**70}, "seed must be a whole number"),
    ({"comm_hook": "x"}, "comm_hook must be a tuple"),
    ({"schedulers": [1]}, "schedulers must be a scheduler"),
    ({"global_batch_size": True}, "global_batch_size must be a whole number"),
    ({"model": "model"}, "model must be a torch.nn.Module"),
    ({"loader": [1]}, "the loader must be a torch DataLoader, not list"),
    ({"loader": "a dataset without a length"}, "TypeError: object of type 'NoLength' has no len()"),
]


@pytest.mark.multiprocess
def test_a_wrong_argument_of_one_worker_is_told_on_all():
    outcomes = run_workers(training.prepare_wrongly, 3, Run(), 1, [mistake for mistake, _ in MISTAKES])
    for rank, sentences in enumerate(results(outcomes)):
        for sentence, (_, says) in zip(sentences, MISTAKES, strict=True):
            assert sentence.startswith(f"worker 1: {says}" if rank != 1 else says)


@pytest.fixture
def agents():
    """The environment of workers whose store torchrun's agent keeps."""
    store = TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    yield place
    del store


@pytest.mark.multiprocess
@pytest.mark.parametrize("keeper", ["torchrun's agent", "worker 0"])
def test_a_worker_that_would_join_no_servers_where_the_others_do_is_told_of_before_any_waits(keeper, agents):
    place = faults.meeting_place() if keeper == "worker 0" else agents
    # Which come one right after the other, so that a worker may be at the next one while another is at this.
    mistakes = [{"scheme": 3}, {"scheme": "aspp"}, {"scheme": "bsp"}, {"seed": "a"}, {"timeout": "b"}]
    outcomes = run_workers(training.prepare_wrongly, 3, Run(scheme="asp"), 1, mistakes, environment=place)
    for rank, told in enumerate(results(outcomes)):
        whose = "worker 1: " if rank != 1 else ""
        assert told[0].startswith(f"{whose}scheme must be a scheme string")
        assert told[1].startswith(f"{whose}there is no scheme 'aspp'")
        assert told[2] == "worker 1 has the scheme 'bsp' where the others have 'asp': start every worker with the same"
        assert told[3].startswith(f"{whose}seed must be")
        assert told[4].startswith(f"{whose}timeout must be")
