"""Over a network, weights are sent from where the server keeps them, and each answer has those of one version."""

import weakref

import numpy as np
import pytest
import torch
from support.in_memory import connected_pair
from support.lone_server import Line

from evenstep.core.values import UNLIMITED, Problem
from evenstep.launch.server_settings import ServerSettings
from evenstep.protocol.run_spec import RunSpec
from evenstep.protocol.shard_messages import ShardAnswer, ShardCommit, ShardInitialise
from evenstep.schemes import parse_scheme
from evenstep.server.shard_state import ShardState
from evenstep.torch.engines.describe import describe, layout_of, options_of

WORKERS = 3


class Server:
    """A shard of one weight, which begins at 0; a commit lowers it by 1 for each worker that it is of."""

    def __init__(self, folder):
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        spec, ones = describe(optimizer), np.ones(WORKERS, dtype=np.int64)
        run = RunSpec(
            scheme=parse_scheme("asp"),
            problem=Problem(global_batch_size=WORKERS, minimum=ones, maximum=ones * UNLIMITED),
            length=8, drop_last=False, layout=layout_of(model.named_parameters(), [optimizer]), optimizers=(spec,),
        )  # fmt: skip
        self.options = options_of(spec, optimizer)
        self.state = ShardState(ServerSettings(count=1, workers=WORKERS, snapshots=folder, heartbeat_seconds=1e9))
        self.state.define(run.encode())
        self.ends = []
        for worker in range(WORKERS):
            end, other = connected_pair()
            self.ends.append(end)
            self.state.slot(worker, 1, Line(other, local=False))
        self.state.carry_out(ShardInitialise(worker=0, version=0))
        for worker in range(WORKERS):
            self.answer(worker)

    def answer(self, worker):
        sequence = self.state.slots[worker].sequence + 1
        self.state.answer(
            ShardAnswer(worker=worker, incarnation=1, sequence=sequence, has=-1, ahead=(), whole=True), None
        )

    def commit(self, *workers, compensation=0.0):
        for worker in workers:
            self.state.slots[worker].gradients[:4].view(torch.float32).fill_(1.0)
            self.state.stage((worker, 1, 1))
        pushes = tuple(((worker, 1, 1), 1.0) for worker in workers)
        self.state.commit(
            ShardCommit(
                pushes=pushes, options=self.options, factors=(1.0,), compensation=(compensation,), direct=(0.0,)
            )
        )

    def held(self, worker):
        return float(self.state.slots[worker].weights[:4].view(torch.float32))


@pytest.fixture
def server(tmp_path):
    server = Server(tmp_path)
    yield server
    for worker in list(server.state.slots):
        server.state.leave(worker, 1)


def test_an_answer_on_its_way_keeps_its_version_whatever_is_committed_meanwhile(server):
    for commits in range(1, 7):
        pushes = 1 + commits % 2
        server.commit(pushes)
        server.answer(pushes)
        assert (server.held(0), server.held(pushes)) == (0.0, -commits)
    assert server.held(1) == -5.0 or server.held(2) == -5.0
    lies = {id(slot.weights) for slot in server.state.slots.values()} | {id(server.state.shard.weights)}
    assert len(lies | {id(each.message) for each in server.state._former}) <= WORKERS + 1


def test_weights_stay_where_they_are_if_all_who_have_them_push(server):
    before = server.state.shard.weights
    server.commit(*range(WORKERS))
    assert server.state.shard.weights is before
    assert server.held(0) == -WORKERS


def test_a_correction_for_staleness_finds_the_weights_that_the_gradient_is_of(server):
    server.commit(*range(WORKERS), compensation=1.0)
    assert server.held(0) == 0.0
    assert float(server.state.shard.weights[:4].view(torch.float32)) == -WORKERS


@pytest.mark.parametrize("worker", range(WORKERS))
def test_what_arrives_is_what_was_answered(server, worker):
    server.commit(*range(WORKERS))
    server.answer(worker)
    arrived = []
    for _ in range(2):
        message = server.ends[worker].receive(30.0)
        content = bytearray(message.payload_bytes)
        server.ends[worker].receive_payload(memoryview(content))
        arrived.append(np.frombuffer(content[:4], dtype=np.float32)[0])
    assert arrived[1] == -WORKERS


def test_the_memory_of_messages_goes_with_their_workers(server):
    for worker in (1, 2, 1):
        server.commit(worker)
        server.answer(worker)
    messages = [weakref.ref(each.message) for each in server.state._former]
    assert len(messages) == 2
    for worker in range(WORKERS):
        server.state.leave(worker, 1)
    assert not any(message() is not None for message in messages)
