"""A group server between workers and a parent, both played by the test."""

import msgspec
import numpy as np
import pytest
import torch
from support.in_memory import connected_pair

from evenstep.core.values import UNLIMITED, Problem, Reports
from evenstep.protocol.encoding import decode, encode
from evenstep.protocol.group_messages import (
    FROM_GROUP,
    FromLine,
    LineClosed,
    LineEnded,
    Together,
    TogetherRefused,
    ToLine,
)
from evenstep.protocol.messages import (
    ANSWERED,
    ASKED,
    Again,
    Begin,
    Follow,
    Goodbye,
    Grant,
    NumberedReply,
    NumberedRequest,
    Placed,
    PushGradients,
    Resend,
    ServeGroup,
    Stage,
    Start,
)
from evenstep.protocol.run_spec import RunSpec
from evenstep.schemes import parse_scheme
from evenstep.server.group.group import ServedGroup
from evenstep.tensors.messages import memory_of
from evenstep.torch.engines.describe import describe, layout_of
from evenstep.transport.base import ConnectionLostError
from evenstep.transport.segment import open_segment

SECONDS = 10.0
BEGIN = Begin(number=0, epoch=0, ahead=0)
ROW = (0,) * Reports.columns()


def push_request(units=2):
    push = PushGradients(claim=0, weights=0, samples=2, units=units, row=ROW, norm=1.0)
    return NumberedRequest(sequence=2, has=0, body=push)


def description(dtype):
    model = torch.nn.Linear(4, 1, bias=False, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    layout = layout_of(model.named_parameters(), [optimizer])
    limits = np.ones(2, dtype=np.int64)
    spec = RunSpec(
        scheme=parse_scheme("bsp:engine=server"),
        problem=Problem(global_batch_size=4, minimum=limits, maximum=limits * UNLIMITED),
        length=60, drop_last=False, layout=layout, optimizers=(describe(optimizer),),
    )  # fmt: skip
    return spec.encode(), layout.shards(1)[0].nbytes


class Worker:
    """One that is here and computes, with its gradients in memory that it shares with the group server."""

    def __init__(self, run, line, rank=None):
        self.line = line
        rank = line - 1 if rank is None else rank
        self.end, other = connected_pair()
        self.member = run.group.open(other)
        start = Start(rank=rank, incarnation=-1, has=-1, timeout=60.0)
        self.ask(start, memoryview(run.described))
        run.hear(Start)
        run.say(line, Placed(incarnation=line, heartbeat=1.0, nbytes=run.nbytes, version=0))
        (file,) = self.end.receive(SECONDS).files
        both = torch.from_numpy(np.frombuffer(open_segment(file, 2 * run.nbytes), dtype=np.uint8))
        self.gradients, self.weights = both[: run.nbytes], both[run.nbytes :]
        self.ask(NumberedRequest(sequence=1, has=-1, body=BEGIN))
        run.hear(NumberedRequest)
        work = Grant(claims=((0, ((0, 2),)),), over=False)
        run.say(line, NumberedReply(sequence=1, weights=False, version=0, body=work))
        assert self.hear().body == work

    def ask(self, asked, *payload):
        self.end.send(encode(asked), *payload)
        assert self.member.serve_one()

    def hear(self):
        return decode(ANSWERED, self.end.receive(SECONDS).header)

    def push(self, dtype, value, **fields):
        self.gradients[: 4 * dtype.itemsize].view(dtype).fill_(value)
        self.ask(push_request(**fields))


class Run:
    """A group server, the parent's end of its connection, and two workers."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.described, self.nbytes = description(dtype)
        self.parent, end = connected_pair()
        self.group = ServedGroup(workers=2, connect=lambda: end, patience_seconds=60.0)
        self.workers = [Worker(self, line) for line in (1, 2)]

    def say(self, line, answer, *payload):
        """Answer the worker behind this line."""
        self.tell(ToLine(line=line, message=msgspec.Raw(encode(answer))), *payload)

    def tell(self, message, *payload):
        self.parent.send(encode(message), *payload)

    def hear(self, kind):
        """What the group server passes on, which is of this kind; and its message."""
        message = self.parent.receive(SECONDS)
        if message.header == encode(ServeGroup()):
            message = self.parent.receive(SECONDS)
        said = decode(FROM_GROUP, message.header)
        if isinstance(said, FromLine):
            said = decode(ASKED, bytes(said.message))
        assert isinstance(said, kind)
        return said, message

    def hear_together(self):
        """The lines whose pushes come as one, and their gradient."""
        together, message = self.hear(Together)
        requests = [bytearray(length) for length in together.lengths]
        gradients = bytearray(message.payload_bytes - sum(together.lengths))
        self.parent.receive_payload(*map(memoryview, requests), memoryview(gradients))
        assert all(isinstance(decode(ASKED, bytes(request)).body, PushGradients) for request in requests)
        mean = torch.frombuffer(gradients, dtype=torch.uint8)[: 4 * self.dtype.itemsize].view(self.dtype).tolist()
        assert len(set(mean)) == 1
        return together.number, list(together.lines), mean[0]


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def run(request):
    made = Run(request.param)
    yield made
    for worker in made.workers:
        worker.end.close()
        assert not worker.member.serve_one()
    made.parent.close()


def test_pushes_of_a_group_are_one_with_the_mean_of_their_gradients(run):
    one, two = run.workers
    one.push(run.dtype, 1.0, units=6)
    two.push(run.dtype, 3.0, units=2)
    assert run.hear_together() == (1, [1, 2], 1.5)


def test_what_the_parent_refuses_comes_again_without_who_is_gone(run):
    one, two = run.workers
    one.push(run.dtype, 1.0)
    two.push(run.dtype, 3.0)
    assert run.hear_together() == (1, [1, 2], 2.0)
    run.tell(LineClosed(line=2))
    run.tell(TogetherRefused(number=1))
    assert run.hear_together() == (2, [1], 1.0)
    with pytest.raises(ConnectionLostError):
        two.end.receive(SECONDS)


def test_weights_that_came_once_are_for_all(run):
    weights = torch.arange(run.nbytes, dtype=torch.uint8)
    for worker, payload in zip(run.workers, ([memory_of(weights)], []), strict=True):
        worker.push(run.dtype, 1.0)
        run.say(worker.line, NumberedReply(sequence=2, weights=True, version=1), *payload)
    for worker in run.workers:
        assert worker.hear() == NumberedReply(sequence=2, weights=True, version=1)
        assert worker.weights.equal(weights)


def test_what_only_servers_ask_of_each_other_is_not_passed_on(run):
    for message in (
        Together(number=1, lines=(1,), lengths=(1,)),
        FromLine(line=1, message=msgspec.Raw(encode(Goodbye()))),
        LineEnded(line=1),
        Follow(),
        ServeGroup(),
        Stage(sequence=5),
    ):
        run.workers[0].ask(message)
        assert run.workers[0].hear().kind == "ProtocolError"


def test_a_request_that_comes_again_is_answered_again_and_not_passed_on(run):
    one, two = run.workers
    one.push(run.dtype, 1.0)
    one.ask(push_request())
    one.ask(Again(sequence=2))
    assert one.hear().sequence == 2
    one.ask(Again(sequence=3))
    assert one.hear() == Resend(sequence=3)
    two.push(run.dtype, 3.0)
    assert run.hear_together() == (1, [1, 2], 2.0)
    run.say(1, NumberedReply(sequence=2, weights=False, version=1, body=Grant(claims=(), over=True)))
    answer = one.hear()
    one.ask(Again(sequence=2))
    assert one.hear() == answer


def test_where_the_parent_is_lost_so_are_the_workers_who_then_begin_anew(run):
    run.parent.close()
    for worker in run.workers:
        with pytest.raises(ConnectionLostError):
            worker.end.receive(SECONDS)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_worker_that_was_given_up_is_expected_back_for_a_while_when_all_others_are_done(run, comes_back):
    one, two = run.workers
    run.group.look(100.0)
    run.tell(LineClosed(line=2))
    with pytest.raises(ConnectionLostError):
        two.end.receive(SECONDS)
    one.end.close()
    assert not one.member.serve_one()
    run.hear(LineEnded)
    run.group.look(219.0)
    assert not run.group.deserted
    if comes_back:
        again = Worker(run, 3, rank=1)
        again.ask(Goodbye())
        again.end.close()
        assert not again.member.serve_one()
    else:
        run.group.look(221.0)
    assert run.group.deserted
