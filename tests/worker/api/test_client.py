"""Training on parameter servers without torch in the workers: NumPy workers in real processes."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
import torch
from support import any_framework
from support.any_framework import EPOCHS, LENGTH, WORKERS
from support.served import serving

import evenstep
from evenstep.protocol.optimizer import spec_of
from evenstep.torch.engines.describe import describe

pytestmark = pytest.mark.xdist_group("client")

SEVERAL = "asp:exchange=overlapped,servers=2"
SCHEMES = {"ssp:bound=1": 1, "dssp": 1, SEVERAL: 1, "bsp:engine=server": 2}
"""How many servers follow each other in the run of each scheme."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every scheme came to on each worker, from one start of the workers."""
    with ExitStack() as stack:

        def servers():
            settings = {"snapshots": str(tmp_path_factory.mktemp("snapshots")), "count": 1, "workers": WORKERS}
            return stack.enter_context(serving(settings, 1))

        two = stack.enter_context(evenstep.start_servers(SEVERAL, workers=WORKERS))
        started = {
            scheme: [(two.addresses, two.secret)] if scheme == SEVERAL else [servers() for _ in range(count)]
            for scheme, count in SCHEMES.items()
        }
        jobs = {scheme: (any_framework.served, {"scheme": scheme, "servers": each}) for scheme, each in started.items()}
        for name, function in (("unlike", any_framework.unlike_client), ("same rank", any_framework.same_rank)):
            jobs[name] = function, dict(zip(("servers", "secret"), servers(), strict=True))
        return any_framework.run(jobs)


@pytest.mark.multiprocess
def test_no_worker_imports_torch(found):
    assert [value["torch"] for value in found] == [False] * WORKERS


@pytest.mark.multiprocess
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_position_is_taken_once_in_each_epoch(found, scheme):
    for epoch in range(EPOCHS):
        shares = [share for value in found for share in value[scheme]["taken"] if share[0] == epoch]
        assert sorted(position for _, _, positions, _ in shares for position in positions) == list(range(LENGTH))


@pytest.mark.multiprocess
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_workers_end_an_epoch_with_the_same_weights_which_have_learned(found, scheme):
    first = any_framework.loss_of(any_framework.first_weights(), any_framework.digits())
    for value in found:
        for weight, same in zip(value[scheme]["weights"], found[0][scheme]["weights"], strict=True):
            np.testing.assert_array_equal(weight, same)
        assert value[scheme]["loss"] < first / 2
        assert value[scheme]["fresh"]


@pytest.mark.multiprocess
def test_behind_a_barrier_servers_train_as_one_process_also_when_others_go_on(found):
    expected = any_framework.alone(any_framework.digits())
    for weight, one in zip(found[0]["bsp:engine=server"]["weights"], expected, strict=True):
        np.testing.assert_allclose(weight, one, rtol=0, atol=1e-12)


@pytest.mark.multiprocess
def test_all_workers_are_told_of_other_options_on_one(found):
    for value in found:
        assert value["unlike"].startswith("DisagreementError: worker 2 has the optimizer 'SGD(lr=0.2, momentum=0, ")


@pytest.mark.multiprocess
def test_a_second_process_of_the_same_rank_is_refused_at_once(found):
    said = sorted(value["same rank"] for value in found)
    assert said[:2] == ["", ""]
    assert said[2].startswith("two processes have the rank 1 (")


def test_what_a_client_is_made_with_is_checked(monkeypatch):
    def client(**given):
        common = {"rank": 0, "workers": 1, "weights": [np.zeros(2)], "length": 8, "global_batch_size": 4}
        evenstep.Client("asp", **common | given)

    def refused(sentence, **given):
        with pytest.raises(evenstep.ConfigError, match="^" + re.escape(sentence)):
            client(**given)

    monkeypatch.delenv("EVENSTEP_SECRET", raising=False)
    refused(
        "there are no servers to join: start the script with evenstep run and a scheme on servers, such as --scheme ssp"
    )
    refused("there are no servers to join", servers=[["unix:@nowhere"]])
    refused("invalid address 'unix:nowhere': use unix:@NAME", servers=[["unix:nowhere"]])
    for wrong in ("tcp://127.0.0.1:1", ["tcp://127.0.0.1:1"], [[1]], 1):
        refused("servers takes a list of addresses for each server, as start_servers(...).addresses", servers=wrong)
    for wrong in ("secret", 7):
        refused("the secret of the servers must be hexadecimal", servers=[["unix:@nowhere"]], secret=wrong)
    refused("rank must be a whole number from 0 to 0, not 1", rank=1)
    refused("workers must be a whole number from 1 to 2147483647, not '2'", workers="2")
    refused("timeout must be a positive number of seconds", timeout=-1)


MISTAKES = {
    "length must be a whole number from 1": {"length": 0},
    "the scheme 'lb-bsp' needs no parameter servers": {"scheme": "lb-bsp"},
    "the local steps of 'asp:period=4' run on PyTorch only: leave out period here": {"scheme": "asp:period=4"},
    "weights takes a list of numpy arrays, not ndarray": {"weights": np.zeros(2)},
    "weight 0 is int64: servers train": {"weights": [np.zeros(2, dtype=np.int64)]},
    "SGD has no option 'momentun': did you mean 'momentum'": {"options": {"momentun": 0.9}},
    "the servers do not support the option lr=nan: use finite numbers": {"options": {"lr": float("nan")}},
    "the servers do not support the option betas=('0.9', 1)": {"optimizer": "Adam", "options": {"betas": ("0.9", 1)}},
    "optimizer takes a name such as 'SGD', and options a dict, not type and {}": {"optimizer": torch.optim.SGD},
    "optimizer takes a name such as 'SGD', and options a dict, not 'SGD' and 0.1": {"options": 0.1},
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_a_mistake_is_told_also_where_no_server_can_be_reached(sentence):
    given = {"scheme": "asp", "rank": 0, "workers": 1, "weights": [np.zeros(2)], "length": 8, "global_batch_size": 4}
    given |= {"servers": [["unix:@evenstep-nowhere"]], "secret": "ab" * 32, "timeout": 1e6}
    with pytest.raises(evenstep.ConfigError, match="^" + re.escape(sentence)):
        evenstep.Client(**given | MISTAKES[sentence])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"scheme": "lb-bsp"}, "the scheme 'lb-bsp' needs no servers: use evenstep.Balancer"),
        (
            {"scheme": None},
            "a scheme must be a string such as 'lb-bsp', or what a recipe such as evenstep.schemes.lb_bsp()",
        ),
        ({"workers": "two"}, "workers must be a whole number from 1 to 2147483647, not 'two'"),
        ({"workers": 0}, "workers must be a whole number from 1 to 2147483647, not 0"),
        ({"secret": "secret"}, "the secret of the servers must be hexadecimal digits"),
        ({"secret": "ab"}, "a secret of 1 bytes could be guessed: use at least 16"),
        ({"run_dir": "x" * 300}, f"the run directory {'x' * 300} cannot be written (File name too long): give another"),
        ({"run_dir": 3}, "run_dir must be the path of a folder, not 3"),
        ({"listen": None}, "listen must be a host name or an address, not None"),
        ({"resume": "yes"}, "resume must be True or False, not 'yes'"),
    ],
)
def test_a_wrong_argument_starts_no_servers(given, sentence):
    with pytest.raises(evenstep.ConfigError, match="^" + re.escape(sentence)):
        evenstep.start_servers(**{"scheme": "asp", "workers": 2} | given)


@pytest.mark.multiprocess
def test_a_mistake_of_a_client_is_one_sentence():
    weights = [np.zeros((2, 3)), np.zeros(3, dtype=np.float32)]
    with evenstep.start_servers("asp", workers=1) as servers:

        def client(scheme="asp", **given):
            common = {"rank": 0, "workers": 1, "length": 8, "global_batch_size": 4, "weights": weights}
            joined = {"servers": servers.addresses, "secret": servers.secret}
            return evenstep.Client(scheme, **common | joined | given)

        def refused(sentence):
            return pytest.raises(evenstep.ConfigError, match=sentence)

        with refused("the scheme 'lb-bsp' needs no parameter servers"):
            client("lb-bsp")
        with refused("the scheme asks for 2 servers but 1 were started"):
            client("asp:servers=2")
        with refused("the servers were started for 1 workers and this one was told of 2"):
            client(workers=2)
        made = client(options={"lr": np.float32(0.5), "nesterov": np.False_}, length=np.int64(8), rank=np.int32(0))
        assert made.options["lr"] == 0.5
        with refused("there is no current share"):
            made.push(weights)
        shares = made.epoch()
        assert next(shares).weight == 1
        with refused("push takes a gradient of each weight"):
            made.push(weights[:1])
        with refused("push takes a list of arrays, a gradient of each weight, not None"):
            made.push(None)
        with refused("the gradient of weight 1 is complex128: push takes real numbers"):
            made.push([weights[0], weights[1].astype(complex)])
        with refused("a number from 0 to 1e"):
            made.report(1e300)
        made.push(weights)
        next(shares)
        with refused("a share was not pushed: call client.push"):
            next(shares)
        shares = made.epoch(0)
        next(shares)
        made.close()
        for use in (made.epoch().__next__, shares.__next__, partial(made.push, weights)):
            with refused("this run was closed: start another one"):
                use()
        made = client(options=made.options)
        made.close()
        with refused("this run was closed: start another one"):
            next(made.epoch())


@pytest.mark.multiprocess
def test_a_worker_that_left_a_loop_pushes_on_the_weights_that_it_was_given_then(tmp_path):
    """Others have committed between the begin of the loop and its end, and nothing after it."""
    gradient, settings = [np.ones(2)], {"snapshots": str(tmp_path), "count": 1, "workers": 2}
    with serving(settings, 1) as (servers, secret), ThreadPoolExecutor(2) as pool:

        def client(rank):
            joined = {"servers": servers, "secret": secret, "rank": rank, "workers": 2}
            return evenstep.Client("asp", weights=[np.zeros(2)], length=8, global_batch_size=4, **joined)

        left, other = pool.map(client, range(2))
        looked, stepped = left.epoch(), other.epoch()
        list(pool.map(next, (looked, stepped)))  # Nobody is served before all have begun.
        other.push(gradient)
        looked.close()
        stepped.close()
        assert left.weights[0].tolist() == other.weights[0].tolist() != [0.0, 0.0]
        shares, before = left.epoch(), left.weights[0].copy()
        next(shares)
        left.push(gradient)
        assert (left.weights[0] < before).all()
        left.close()
        other.close()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_an_optimizer_is_described_as_a_torch_worker_describes_it(kind):
    (described,) = describe(kind([torch.nn.Parameter(torch.zeros(2))])).groups
    (ours,) = spec_of(kind.__name__, {}).groups
    assert {name: value for name, value in described.items() if name != "decoupled_weight_decay"} == ours
