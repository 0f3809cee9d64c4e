"""The parent's end of a group server's connection: what is shared comes and goes once, and whole or not at all."""

import threading

import msgspec
import numpy as np
import pytest
import torch
from support.in_memory import connected_pair

from evenstep.core.supervision import Why
from evenstep.core.values import UNLIMITED, Problem
from evenstep.launch.server_settings import ServerSettings
from evenstep.protocol.encoding import decode, encode
from evenstep.protocol.group_messages import TO_GROUP, FromLine, LineClosed, Together, TogetherRefused, ToLine
from evenstep.protocol.messages import (
    ANSWERED,
    Begin,
    Initialise,
    NumberedRequest,
    PushGradients,
    SendWeights,
    ServeGroup,
    Start,
)
from evenstep.protocol.run_spec import RunSpec
from evenstep.schemes import parse_scheme
from evenstep.server.primary import Primary
from evenstep.server.rendezvous import Rendezvous
from evenstep.server.requests import Service
from evenstep.server.session import ServerSession
from evenstep.server.shard_state import ShardState
from evenstep.telemetry import Silent
from evenstep.tensors.messages import memory_of
from evenstep.torch.engines.describe import describe, layout_of, options_of

WORKERS = 3
SECONDS = 10.0


class Parent:
    """A parent with one session, to whose other end the test speaks as a group server does."""

    def __init__(self, folder):
        model = torch.nn.Linear(4, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        layout, self.spec = layout_of(model.named_parameters(), [optimizer]), describe(optimizer)
        self.nbytes = layout.shards(1)[0].nbytes
        self.options = options_of(self.spec, optimizer)
        limits = np.ones(WORKERS, dtype=np.int64)
        self.described = RunSpec(
            scheme=parse_scheme("bsp:engine=server"),
            problem=Problem(global_batch_size=6, minimum=limits, maximum=limits * UNLIMITED),
            length=60, drop_last=False, layout=layout, optimizers=(self.spec,),
        ).encode()  # fmt: skip
        self.reported = []
        self.shard_state = ShardState(ServerSettings(count=1, workers=WORKERS, snapshots=folder, heartbeat_seconds=1e9))
        self.primary = Primary(
            shard_state=self.shard_state, followers=[], recorder=Silent(), first_incarnation=0, clock=lambda: 0.0,
            say=print, report=self.reported.append,
        )  # fmt: skip
        self.end, other = connected_pair()
        service = Service(
            shard_state=self.shard_state,
            primary=self.primary,
            rendezvous=Rendezvous(WORKERS),
            lock=threading.RLock(),
        )  # fmt: skip
        self.session = ServerSession(other, service)
        self.ask(ServeGroup())

    def ask(self, message, *payload):
        self.end.send(encode(message), *payload)
        return self.session.serve_one()

    def ask_for(self, line, asked, *payload):
        return self.ask(FromLine(line=line, message=msgspec.Raw(encode(asked))), *payload)

    def hear(self):
        """The next message, and whether weights came with it; of an answer the line, too."""
        message = self.end.receive(SECONDS)
        said = decode(TO_GROUP, message.header)
        if isinstance(said, ToLine):
            return said.line, decode(ANSWERED, bytes(said.message)), message.payload_bytes > 0
        return None, said, False

    def together(self, number, requests, message=None):
        encoded = [encode(request) for request in requests.values()]
        together = Together(number=number, lines=tuple(requests), lengths=tuple(map(len, encoded)))
        payload = [] if message is None else [memory_of(message)]
        self.ask(together, *map(memoryview, encoded), *payload)

    def gradient(self, value):
        message = torch.zeros(self.nbytes, dtype=torch.uint8)
        message[:16].view(torch.float32).fill_(value)
        return message

    def begun(self):
        """Lines 1, 2 and 3 are workers 0, 1 and 2, and have a claim each."""
        for rank in range(WORKERS):
            start = Start(rank=rank, incarnation=-1, has=-1, timeout=60.0)
            self.ask_for(rank + 1, start, memoryview(self.described))
            assert self.hear()[1].incarnation == rank + 1
        begin = Begin(number=0, epoch=0, ahead=0)
        for rank in range(WORKERS):
            self.ask_for(rank + 1, NumberedRequest(sequence=1, has=-1, body=begin))
        line, answer, _ = self.hear()
        assert (line, answer.sequence, answer.weights, answer.body) == (1, 1, False, SendWeights())
        self.together(0, {1: NumberedRequest(sequence=2, has=-1, body=Initialise())}, self.gradient(0.0))
        assert self.hear()[1].sequence == 2
        self.ask_for(1, NumberedRequest(sequence=3, has=-1, body=begin))
        return [self.hear() for _ in range(WORKERS)]

    def pushes(self, answers, samples=2):
        about = {"samples": samples, "units": samples, "row": (samples, 1000, 0, UNLIMITED), "norm": 1.0}
        pushes = {
            line: PushGradients(claim=answer.body.claims[0][0], weights=0, options=self.options, **about)
            for line, answer, _ in answers
        }
        return {line: NumberedRequest(sequence=4, has=0, body=push) for line, push in pushes.items()}

    def weight(self):
        message = torch.zeros(self.nbytes, dtype=torch.uint8)
        self.shard_state.shard.read_weights(message)
        return float(message[:4].view(torch.float32))


@pytest.fixture
def parent(tmp_path):
    made = Parent(tmp_path)
    yield made
    made.end.close()
    assert not made.session.serve_one()
    # With the group server all of its workers are gone.
    assert not made.shard_state.slots


def test_weights_go_once_and_a_gradient_counts_for_all_who_pushed_it(parent):
    answers = parent.begun()
    assert [weights for _, _, weights in answers] == [True, False, False]
    assert all(answer.weights for _, answer, _ in answers)
    parent.together(1, parent.pushes(answers), parent.gradient(0.5))
    answers = [parent.hear() for _ in range(WORKERS)]
    assert [weights for _, _, weights in answers] == [True, False, False]
    assert {answer.version for _, answer, _ in answers} == {1}
    assert parent.weight() == -0.5


def test_pushes_of_one_commit_may_come_in_several_messages(parent):
    pushes = parent.pushes(parent.begun())
    parent.together(1, {line: pushes[line] for line in (1, 3)}, parent.gradient(0.25))
    assert parent.shard_state.version == 0
    parent.together(2, {2: pushes[2]}, parent.gradient(1.0))
    assert parent.shard_state.version == 1
    assert parent.weight() == pytest.approx(-(0.25 * 2 + 1.0) / 3)


def test_weights_reach_the_group_though_the_worker_that_is_answered_first_has_just_gone(parent):
    requests = parent.pushes(parent.begun())
    last = {3: requests.pop(3)}
    parent.together(1, requests, parent.gradient(1.0))
    parent.shard_state.slots[0].connection.put(None)  # What its session does next.
    parent.together(2, last, parent.gradient(1.0))
    assert [parent.hear()[::2] for _ in range(WORKERS)] == [(1, True), (2, False), (3, False)]


def test_empty_pushes_come_without_a_gradient(parent):
    parent.together(1, parent.pushes(parent.begun(), samples=0))
    assert {parent.hear()[0] for _ in range(WORKERS)} == {1, 2, 3}
    assert parent.weight() == 0.0


def test_a_gradient_of_which_a_worker_is_gone_is_refused_and_comes_again_without(parent):
    pushes = parent.pushes(parent.begun())
    parent.primary.lose(2, 3, Why.SILENT)
    parent.together(1, pushes, parent.gradient(0.5))
    assert parent.hear()[1] == LineClosed(line=3)
    assert parent.hear()[1] == TogetherRefused(number=1)
    assert parent.shard_state.version == 0
    del pushes[3]
    parent.together(2, pushes, parent.gradient(0.25))
    assert parent.weight() == -0.25


def test_a_push_that_comes_twice_is_taken_in_once(parent):
    answers = parent.begun()
    for number in (1, 2):
        parent.together(number, parent.pushes(answers), parent.gradient(0.5))
    assert parent.shard_state.version == 1
    assert parent.weight() == -0.5


@pytest.mark.parametrize(
    "message", [Together(number=1, lines=(1,), lengths=(2**27,)), Together(number=1, lines=(1,), lengths=(3,))]
)
def test_what_no_group_server_sends_ends_the_connection(parent, message):
    parent.begun()
    assert not parent.ask(message, memoryview(bytes(5)))
