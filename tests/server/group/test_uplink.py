"""The parent's end of a group server's connection: what is shared comes and goes once, and whole or not at all."""

import threading

import numpy as np
import pytest
import torch

from evenstep.core.supervision import Why
from evenstep.core.values import UNLIMITED, Problem
from evenstep.protocol.optimizer import options_to_record
from evenstep.protocol.run_spec import RunSpec
from evenstep.schemes import parse_scheme
from evenstep.server.primary import Primary
from evenstep.server.rendezvous import Rendezvous
from evenstep.server.session import Session
from evenstep.server.shard.snapshots import Snapshots
from evenstep.server.shard_state import ShardState
from evenstep.telemetry import Silent
from evenstep.tensors.memory import memory_of
from evenstep.testing.in_memory import connected_pair
from evenstep.torch.engines.describe import describe, layout_of, options_of
from evenstep.transport.codec import encode_header

WORKERS = 3
SECONDS = 10.0


class Parent:
    """A parent with one session, to whose other end the test speaks as a group server does."""

    def __init__(self, folder):
        model = torch.nn.Linear(4, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        layout, self.spec = layout_of(model.named_parameters(), [optimizer]), describe(optimizer)
        self.nbytes = layout.shards(1)[0].nbytes
        self.options = options_to_record(options_of(self.spec, optimizer))
        limits = np.ones(WORKERS, dtype=np.int64)
        self.described = RunSpec(
            scheme=parse_scheme("bsp:engine=server"),
            problem=Problem(global_batch_size=6, minimum=limits, maximum=limits * UNLIMITED),
            length=60, drop_last=False, layout=layout, optimizers=(self.spec,),
        ).encode()  # fmt: skip
        snapshots = Snapshots(folder, 1)
        self.reported = []
        self.shard_state = ShardState(index=0, count=1, snapshots=snapshots)
        self.primary = Primary(
            shard_state=self.shard_state, workers=WORKERS, followers=[], snapshots=snapshots, resume=False,
            snapshot_seconds=1e9, heartbeat_seconds=1e9, recorder=Silent(), first_incarnation=0, clock=lambda: 0.0,
            say=print, report=self.reported.append,
        )  # fmt: skip
        self.end, other = connected_pair()
        self.session = Session(
            other,
            shard_state=self.shard_state,
            primary=self.primary,
            rendezvous=Rendezvous(WORKERS),
            lock=threading.RLock(),
            workers=WORKERS, heartbeat_seconds=1.0,
        )  # fmt: skip
        self.ask({"op": "group"})

    def ask(self, header, *payload):
        self.end.send(header, *payload)
        return self.session.serve_one()

    def hear(self):
        """The next message, and whether weights came with it."""
        message = self.end.receive(SECONDS)
        return message.header, message.payload_bytes > 0

    def together(self, number, requests, message=None):
        encoded = [encode_header(request) for request in requests.values()]
        header = {"op": "together", "number": number, "lines": list(requests), "lengths": list(map(len, encoded))}
        payload = [] if message is None else [memory_of(message)]
        self.ask(header, *map(memoryview, encoded), *payload)

    def gradient(self, value):
        message = torch.zeros(self.nbytes, dtype=torch.uint8)
        message[:16].view(torch.float32).fill_(value)
        return message

    def begun(self):
        """Lines 1, 2 and 3 are workers 0, 1 and 2, and have a claim each."""
        for rank in range(WORKERS):
            header = {
                "op": "start",
                "rank": rank,
                "incarnation": -1,
                "seq": 0,
                "has": -1,
                "timeout": 60.0,
                "line": rank + 1,
            }
            self.ask(header, memoryview(self.described))
            assert self.hear()[0]["incarnation"] == rank + 1
        begin = {"op": "begin", "number": 0, "epoch": 0, "ahead": 0, "has": -1}
        self.ask({**begin, "seq": 1, "line": 1})
        assert self.hear()[0] == {"answer": 1, "initialise": True, "weights": False, "line": 1}
        self.together(0, {1: {"op": "initialise", "seq": 2}}, self.gradient(0.0))
        assert self.hear()[0]["answer"] == 2
        for rank in range(WORKERS):
            self.ask({**begin, "seq": 3, "line": rank + 1})
        return [self.hear() for _ in range(WORKERS)]

    def pushes(self, answers):
        return {
            header["line"]: {
                "op": "push", "seq": 4, "claim": header["claims"][0][0], "weights": 0, "samples": 2, "units": 2,
                "row": [2, 1000, 1000, 0, 0, 0, UNLIMITED], "norm": 1.0, "options": self.options, "has": 0,
            }
            for header, _ in answers
        }  # fmt: skip

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
    assert [weights for _, weights in answers] == [True, False, False]
    assert all(header["weights"] for header, _ in answers)
    parent.together(1, parent.pushes(answers), parent.gradient(0.5))
    answers = [parent.hear() for _ in range(WORKERS)]
    assert [weights for _, weights in answers] == [True, False, False]
    assert {header["version"] for header, _ in answers} == {1}
    assert parent.weight() == -0.5


def test_pushes_of_one_commit_may_come_in_several_messages(parent):
    pushes = parent.pushes(parent.begun())
    parent.together(1, {line: pushes[line] for line in (1, 3)}, parent.gradient(0.25))
    assert parent.shard_state.version == 0
    parent.together(2, {2: pushes[2]}, parent.gradient(1.0))
    assert parent.shard_state.version == 1
    assert parent.weight() == pytest.approx(-(0.25 * 2 + 1.0) / 3)


def test_a_gradient_of_which_a_worker_is_gone_is_refused_and_comes_again_without(parent):
    pushes = parent.pushes(parent.begun())
    parent.primary.lose(2, 3, Why.SILENT)
    parent.together(1, pushes, parent.gradient(0.5))
    assert parent.hear()[0] == {"line": 3, "ended": True}
    assert parent.hear()[0] == {"refused": 1}
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
    "header",
    [
        {"op": "together", "number": 1, "lines": [1], "lengths": [2**27]},
        {"op": "together", "number": 1, "lines": [1], "lengths": [3]},
    ],
)
def test_what_no_group_server_sends_ends_the_connection(parent, header):
    parent.begun()
    assert not parent.ask(header, memoryview(bytes(5)))
