"""Promise 4 on servers against a peer that was let in: it is refused or cut off, and nobody else notices."""

import multiprocessing

import pytest
from support import served_abuse
from support.group_servers import placed
from support.processes import CONTEXT, results, run_workers
from support.served import environment, forked, leaves, server_events, serving
from support.served_faults import rank
from support.training import Run

pytestmark = pytest.mark.multiprocess

MESSAGES = 2_000
MAX_BYTES = 20_000_000


def abuse_or_train(run, servers, messages, seed, number, abused):
    if rank() == 1:
        return served_abuse.abuse(run, servers, messages, seed, number, abused)
    return served_abuse.train_beside(run, number, abused)


@pytest.mark.parametrize(("scheme", "servers", "network"), [("asp:servers=2", 2, False), ("ssp:bound=1", 1, True)])
def test_a_joined_worker_that_sends_rubbish_is_refused_and_disturbs_nobody(tmp_path, scheme, servers, network):
    run = Run(scheme=scheme, samples=40)
    settings = {"snapshots": str(tmp_path / "snapshots"), "count": servers, "workers": 2}
    with serving(settings, servers) as (addresses, secret):
        told = environment(addresses, secret, tmp_path, network=network)
        is_refused_and_disturbs_nobody(tmp_path, run, servers, MESSAGES, [told, told])


def test_behind_a_group_server_too(tmp_path):
    run = Run(scheme="grouped:groups=0/1", samples=40)
    settings = {"snapshots": str(tmp_path / "snapshots"), "count": 1, "workers": 2}
    with serving(settings, 1) as (addresses, secret):
        parent = [each for each in addresses[0] if each.startswith("tcp:")]
        with forked({**settings, "index": 0, "parent": parent}, secret) as server:
            told = [environment(each, secret, tmp_path) for each in (addresses, [server])]
            is_refused_and_disturbs_nobody(tmp_path, run, 2, MESSAGES // 4, told)


def is_refused_and_disturbs_nobody(tmp_path, run, servers, messages, told):
    pids = [process.pid for process in multiprocessing.active_children()]
    assert len(pids) == servers
    shared = CONTEXT.Value("q", 0), CONTEXT.Event()
    outcomes = run_workers(placed, 2, told, abuse_or_train, run, pids, messages, 4, *shared, environment={})
    trained, abused = results(outcomes)
    answers = abused["answers"]
    assert sum(answers.values()) == messages * 6 // 5
    assert set(answers) <= {"closed", *served_abuse.ERRORS}
    assert min(answers["closed"], answers["ProtocolError"]) > messages // 20
    for grown_bytes, descriptors, threads in abused["grown"]:
        assert grown_bytes < MAX_BYTES
        assert descriptors < 10
        assert threads < 10
    passes, losses = zip(*trained, strict=True)
    assert len(passes) > 2, "nothing was trained while the other sent rubbish"
    assert all(positions == list(range(40)) for positions in passes)
    assert losses[-1] < losses[0] / 2
    # The one that trains was never given up.
    assert leaves(tmp_path)[0] == ["is done"]
    assert len(server_events(tmp_path, "join")) > messages // 50
