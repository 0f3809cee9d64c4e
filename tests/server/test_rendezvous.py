"""Where workers tell each other what they were given, also to servers that were started anew."""

import socket
from contextlib import ExitStack

import pytest

from evenstep.core.errors import ConfigError
from evenstep.protocol.encoding import decode
from evenstep.protocol.messages import ANSWERED, Meet
from evenstep.server.rendezvous import Rendezvous
from evenstep.transport.stream import StreamConnection
from evenstep.transport.wire import Wire

SECONDS = 30.0


@pytest.fixture
def pairs():
    with ExitStack() as stack:
        sockets = [socket.socketpair() for _ in range(2)]
        wires = [[Wire(end, patience_seconds=SECONDS) for end in pair] for pair in sockets]
        yield [[stack.enter_context(StreamConnection(wire)) for wire in pair] for pair in wires]


def records(connection):
    met = decode(ANSWERED, connection.receive(SECONDS).header)
    parts = [bytearray(length) for length in met.lengths]
    connection.receive_payload(*map(memoryview, parts))
    return [bytes(part) for part in parts]


def test_all_are_told_once_the_last_has_come(pairs):
    rendezvous = Rendezvous(2)
    rendezvous.come(Meet(rank=1, round=0), b"one", pairs[1][0])
    assert rendezvous.absent == [0]
    rendezvous.come(Meet(rank=0, round=0), b"zero", pairs[0][0])
    assert [records(theirs) for _, theirs in pairs] == [[b"zero", b"one"]] * 2


def test_a_worker_that_was_told_before_hears_nothing_between_the_answers_that_it_waits_for(pairs):
    rendezvous = Rendezvous(2)
    rendezvous.come(Meet(rank=0, round=0, known=True), b"zero", pairs[0][0])
    rendezvous.come(Meet(rank=1, round=0), b"one", pairs[1][0])
    assert records(pairs[1][1]) == [b"zero", b"one"]
    pairs[0][0].send(b"answer", wait=False)
    assert pairs[0][1].receive(SECONDS).header == b"answer"


@pytest.mark.parametrize("known", [False, True])
def test_one_that_leaves_before_the_last_has_come_must_come_again(pairs, known):
    rendezvous = Rendezvous(2)
    rendezvous.come(Meet(rank=0, round=0, known=known), b"zero", pairs[0][0])
    rendezvous.leave(pairs[0][0])
    rendezvous.come(Meet(rank=1, round=0), b"one", pairs[1][0])
    assert rendezvous.absent == [0]


def test_a_second_process_of_a_rank_is_refused_while_the_first_waits_or_trains(pairs):
    rendezvous, first = Rendezvous(1), pairs[0][0]
    rendezvous.come(Meet(rank=0, round=0, process="here:1"), b"zero", first)
    rendezvous.require_single(0, "here:1", first)  # It comes again over another connection.
    rendezvous.require_single(0, "here:2", None)  # The first has its answer and no place: it was given up.
    with pytest.raises(ConfigError, match=r"^two processes have the rank 0"):
        rendezvous.require_single(0, "here:2", first)
    rendezvous.leave(first)
    rendezvous.require_single(0, "here:2", first)
    waiting = Rendezvous(2)
    waiting.come(Meet(rank=0, round=0, process="here:1"), b"zero", first)
    with pytest.raises(ConfigError, match=r"^two processes have the rank 0"):
        waiting.require_single(0, "here:2", None)
