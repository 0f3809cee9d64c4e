"""What a script has of its model, optimizer and process while its weights and state live on servers."""

import copy
import gc
import io
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from support import own_optimizers, served_training
from support.guard import GUARD_SECONDS
from support.processes import results
from support.served import environment, run_served, serving
from support.training import Run
from torch.utils.data import DataLoader, TensorDataset

import evenstep
from evenstep.core.errors import ConfigError
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.torch.processes.join_servers import _JOINED as JOINED
from evenstep.transport.segment import create_segment
from evenstep.worker.servers.remote_shard import RemoteShard

pytestmark = pytest.mark.multiprocess


class Mixed(torch.nn.Module):
    """Parameters of two dtypes, and one without elements."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 100)
        self.second = torch.nn.Linear(100, 2).double()
        self.nothing = torch.nn.Parameter(torch.zeros(0))

    def forward(self, inputs):
        return self.second(self.first(inputs).double())


def prepared(model, *, optimizer=None, scheme="asp", **options):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) if optimizer is None else optimizer
    return evenstep.prepare(model, optimizer, DataLoader(data, batch_size=8), scheme=scheme, **options)


def train(model, optimizer, loader):
    steps = 0
    for inputs, targets in loader:
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
        steps += 1
    return steps


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """A server such as the launcher starts, for tests in which it is of no account who does; forked, so soon there."""
    settings = {"snapshots": str(tmp_path / "snapshots"), "count": 1, "workers": 1}
    with serving(settings, 1) as (addresses, secret):
        for name, value in {**environment(addresses, secret, tmp_path), JOINED: ""}.items():
            monkeypatch.setenv(name, value)
        yield


def saved_bytes(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


def children():
    """The processes that this one has started and not seen end."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def kill_servers(before):
    """All servers of this process die; they are started again."""
    for child in set(children()) - set(before):
        os.kill(int(child), signal.SIGKILL)


def test_a_model_on_servers_is_saved_copied_and_loaded_as_one_of_its_own():
    model = Mixed()
    alone = saved_bytes(model)
    before = children()
    with ExitStack() as stack:
        wrapped, optimizer, loader = prepared(model)
        stack.enter_context(loader)
        for start in range(2):
            if start:
                kill_servers(before)
            assert train(wrapped, optimizer, loader) == 4
            # The names in the file differ by the wrapper's prefix.
            assert abs(saved_bytes(model) - alone) < 1000
            assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
            copied = copy.deepcopy(model.state_dict())
            twin = Mixed()
            twin.load_state_dict(copied)
            assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))


def shared_memory():
    """How many descriptors of shared memory this process has open."""
    gc.collect()
    found = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    return sum("memfd:evenstep" in os.readlink(each) for each in found if each.is_symlink())


def test_a_sweep_leaves_no_server_no_thread_and_no_descriptor():
    before, memory, others = children(), shared_memory(), set(threading.enumerate())
    for _ in range(2):
        model, optimizer, loader = prepared(torch.nn.Linear(4, 2))
        train(model, optimizer, loader)
        loader.close()
        for thread in threading.enumerate():
            if thread.name.startswith("evenstep") and thread not in others:
                thread.join(GUARD_SECONDS)
                assert not thread.is_alive()
        del model, optimizer, loader
        assert children() == before
        assert shared_memory() <= memory


@pytest.mark.usefixtures("launched")
@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_that_have_a_graph_of_their_own_can_be_pushed():
    """As under a gradient penalty; a parameter of many elements is copied piece by piece."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 600), torch.nn.Linear(600, 600), torch.nn.Linear(600, 2))
    wrapped, optimizer, loader = prepared(model)
    with loader:
        for inputs, targets in loader:
            optimizer.zero_grad()
            (wrapped(inputs) - targets).square().mean().backward(create_graph=True)
            optimizer.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@pytest.mark.usefixtures("launched")
def test_a_closed_run_says_so_instead_of_connecting_again():
    model, optimizer, loader = prepared(torch.nn.Linear(4, 2))
    train(model, optimizer, loader)
    loader.close()
    with pytest.raises(ConfigError, match="this run was closed"):
        optimizer.state_dict()


@pytest.mark.usefixtures("launched")
def test_weights_that_the_script_sets_give_way_to_the_servers_with_one_warning():
    model, optimizer, loader = prepared(torch.nn.Linear(4, 2))
    with loader:
        train(model, optimizer, loader)
        kept = [p.detach().clone() for p in model.parameters()]
        for epoch in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            optimizer.param_groups[0]["lr"] = 0.0
            if epoch == 0:
                with pytest.warns(UserWarning, match="weights were changed between steps"):
                    train(model, optimizer, loader)
            else:
                train(model, optimizer, loader)
            assert all(torch.equal(a, b) for a, b in zip(kept, model.parameters(), strict=True))


@pytest.mark.usefixtures("launched")
def test_weights_that_are_loaded_between_prepare_and_the_first_step_are_the_run_s():
    model, optimizer, loader = prepared(torch.nn.Linear(4, 2))
    with loader:
        with torch.no_grad():
            model.module.weight.fill_(3.0)
        optimizer.param_groups[0]["lr"] = 0.0
        train(model, optimizer, loader)
        assert (model.module.weight == 3.0).all()


@pytest.mark.usefixtures("launched")
def test_state_that_the_optimizer_was_prepared_with_is_the_servers():
    module = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0, momentum=0.5)
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    momentum = [optimizer.state[p]["momentum_buffer"].clone() for p in module.parameters()]
    assert any(each.abs().sum() > 0 for each in momentum)
    model, optimizer, loader = prepared(module, optimizer=optimizer)
    with loader:
        for _ in loader:
            optimizer.zero_grad()
            (model(torch.zeros(1, 4)) * 0.0).sum().backward()
            optimizer.step()
            break
        states = optimizer.state_dict()["state"]
    for index, each in enumerate(momentum):
        torch.testing.assert_close(states[index]["momentum_buffer"], 0.5 * each)


def test_servers_that_die_cost_the_pass_in_hand_and_no_state():
    """Once with a batch in hand, whose samples are given to others then, and once before the state is given back."""
    before = children()
    model, optimizer, loader = prepared(torch.nn.Linear(4, 2))
    with loader:
        train(model, optimizer, loader)
        state = optimizer.state_dict()
        steps = 0
        for inputs, targets in loader:
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            if steps == 1:
                kill_servers(before)
                again = optimizer.state_dict()
            optimizer.step()
            steps += 1
        assert steps == 2 + 4  # The pass is the servers' again, from the snapshot at its beginning.
        assert all(
            torch.equal(state["state"][index]["momentum_buffer"], again["state"][index]["momentum_buffer"])
            for index in state["state"]
        )
        kill_servers(before)
        optimizer.load_state_dict(state)
        assert train(model, optimizer, loader) == 4


def test_a_users_optimizer_runs_on_servers_which_import_its_module():
    models = [torch.nn.Linear(4, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    ours, theirs = (own_optimizers.Signs(model.parameters(), lr=0.1) for model in models)
    model, optimizer, loader = prepared(models[0], optimizer=ours, scheme="asp:optimizer=support.own_optimizers:Signs")
    data = list(loader.dataset)
    with loader:
        assert train(model, optimizer, loader) == 4
    batches = [[torch.stack(parts) for parts in zip(*data[at : at + 8], strict=True)] for at in range(0, 32, 8)]
    assert train(models[1], theirs, batches) == 4
    for mine, plain in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(mine, plain, rtol=0, atol=1e-6)


def test_a_users_optimizer_that_servers_cannot_run_is_refused_before_training():
    model = torch.nn.Linear(4, 2)
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = own_optimizers.LimitsTheWhole(model.parameters())
    with pytest.raises(ConfigError, match="LimitsTheWhole: its update of a parameter depends on other parameters"):
        prepared(model, optimizer=optimizer, scheme="asp:optimizer=support.own_optimizers:LimitsTheWhole")
    with pytest.raises(ConfigError, match=r"the module 'no\.module' of a scheme cannot be imported"):
        prepared(model, scheme="asp:optimizer=no.module:Class")
    with pytest.raises(ConfigError, match="the optimizer 'Class' cannot be found: write my_module:MyClass"):
        prepared(model, scheme="asp:optimizer=Class")
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_a_stopped_server_of_this_process_is_replaced_after_its_heartbeat(monkeypatch, capfd):
    for name, value in LaunchSettings(heartbeat_seconds=2.0).to_environment().items():
        monkeypatch.setenv(name, value)
    before = children()
    model, optimizer, loader = prepared(torch.nn.Linear(4, 2))
    with loader:
        train(model, optimizer, loader)
        (server,) = set(children()) - set(before)
        os.kill(int(server), signal.SIGSTOP)
        assert train(model, optimizer, loader) == 4
        assert server not in children()
    text = "evenstep: server 0 was silent for 2 s; all start again from their last snapshot (1 of 3)"
    assert text in capfd.readouterr().err.splitlines()


def test_more_param_groups_than_travel_with_a_push_are_refused():
    before = children()
    module = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(400)])
    optimizer = torch.optim.AdamW([{"params": [p]} for p in module.parameters()])
    with pytest.raises(ConfigError, match=r"the options of 800 param groups take .* put parameters with the same"):
        prepared(module, optimizer=optimizer)
    assert children() == before


@pytest.mark.usefixtures("launched")
def test_an_error_of_the_loop_is_not_hidden_by_what_follows_from_it():
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, index):
            if loader is not None:
                loader.close()
            raise KeyError("the data is broken")

    loader = None
    module = torch.nn.Linear(4, 2)
    model, optimizer, loader = evenstep.prepare(
        module, torch.optim.SGD(module.parameters(), lr=0.1), DataLoader(Broken(), batch_size=8), scheme="asp"
    )
    with pytest.raises(KeyError, match="the data is broken"):
        train(model, optimizer, loader)


def prepare_twice(run):
    served_training.prepared(run)
    with pytest.raises(ConfigError, match="calls prepare a second time"):
        served_training.prepared(run)
    return True


def test_a_second_prepare_under_the_launcher_s_servers_is_refused(tmp_path):
    outcomes = run_served(prepare_twice, 1, Run(scheme="asp", samples=16, epochs=1), run_dir=tmp_path)
    assert results(outcomes) == [True]


def test_a_place_takes_every_segment_that_comes_and_keeps_no_descriptor():
    before = shared_memory()
    shard = RemoteShard(0, lambda index: pytest.fail("nobody connects"))
    for incarnation in (5, 6):
        descriptor, mapping = create_segment(256)
        shard.take_place((descriptor,), 128, incarnation)
        shard.weights[:] = 7
        assert mapping[128:] == bytes([7]) * 128
        mapping.close()
    shard.close()
    kept = shard.weights.copy()
    np.testing.assert_array_equal(kept, 7)
    del shard
    assert shared_memory() <= before
