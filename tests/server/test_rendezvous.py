"""Where workers tell each other what they were given, also to servers that were started anew."""

import socket
from contextlib import ExitStack

import pytest

from evenstep.server.rendezvous import Rendezvous
from evenstep.transport.stream import StreamConnection
from evenstep.transport.wire import SocketWire

SECONDS = 30.0


@pytest.fixture
def pairs():
    with ExitStack() as stack:
        sockets = [socket.socketpair() for _ in range(2)]
        wires = [[SocketWire(end, patience_seconds=SECONDS) for end in pair] for pair in sockets]
        yield [[stack.enter_context(StreamConnection(wire)) for wire in pair] for pair in wires]


def records(connection):
    message = connection.receive(SECONDS)
    parts = [bytearray(length) for length in message.header["lengths"]]
    connection.receive_payload(*map(memoryview, parts))
    return [bytes(part) for part in parts]


def test_all_are_told_once_the_last_has_come(pairs):
    rendezvous = Rendezvous(2)
    rendezvous.come(1, b"one", pairs[1][0], 0)
    assert rendezvous.absent == [0]
    rendezvous.come(0, b"zero", pairs[0][0], 0)
    assert [records(theirs) for _, theirs in pairs] == [[b"zero", b"one"]] * 2


def test_a_worker_that_was_told_before_hears_nothing_between_the_answers_that_it_waits_for(pairs):
    rendezvous = Rendezvous(2)
    rendezvous.come(0, b"zero", pairs[0][0], None)
    rendezvous.come(1, b"one", pairs[1][0], 0)
    assert records(pairs[1][1]) == [b"zero", b"one"]
    pairs[0][0].send({"answer": 7}, wait=False)
    assert pairs[0][1].receive(SECONDS).header == {"answer": 7}


@pytest.mark.parametrize("asked", [0, None])
def test_one_that_leaves_before_the_last_has_come_must_come_again(pairs, asked):
    rendezvous = Rendezvous(2)
    rendezvous.come(0, b"zero", pairs[0][0], asked)
    rendezvous.leave(pairs[0][0])
    rendezvous.come(1, b"one", pairs[1][0], 0)
    assert rendezvous.absent == [0]
