"""What a server cannot do is answered with an error, which reaches the worker even where its line breaks."""

import os

import msgspec
import pytest
from support.lone_server import BEGIN, LoneServer

from evenstep.protocol.messages import Again, NumberedRequest, Refusal, Rest, SendWeights

TOO_EARLY = NumberedRequest(sequence=1, has=-1, body=Rest())
"""Before the worker has begun an epoch."""
NONSENSE = msgspec.msgpack.encode({"op": "nonsense"})


@pytest.mark.parametrize("asked", [TOO_EARLY, Again(sequence=1)], ids=["the same", "the answer"])
def test_a_refusal_that_is_lost_with_the_line_is_sent_again_when_the_worker_is_back_and_asks(tmp_path, asked):
    server = LoneServer(tmp_path / "snapshots", local=False)
    server.say(TOO_EARLY)
    server.end.close()
    while server.session.serve_one():
        pass
    assert server.connect(server.incarnation).incarnation == server.incarnation
    refusal = server.ask(asked)
    assert (refusal.sequence, refusal.kind) == (1, "ProtocolError")


def test_a_refusal_is_of_its_request_alone(tmp_path):
    server = LoneServer(tmp_path / "snapshots", local=False)
    assert "worker 0" in server.ask(TOO_EARLY).error
    assert isinstance(server.request(2, BEGIN).body, SendWeights)


def test_a_refusal_of_what_has_no_number_is_not_kept(tmp_path):
    server = LoneServer(tmp_path / "snapshots", local=False)
    assert isinstance(server.ask(NONSENSE), Refusal)
    assert server.ask(TOO_EARLY).sequence == 1


def test_a_malformed_request_is_refused_by_its_number_and_the_refusal_kept(tmp_path):
    server = LoneServer(tmp_path / "snapshots", local=False)
    refusal = server.ask(msgspec.msgpack.encode({"op": "NumberedRequest", "sequence": 1, "has": "much"}))
    assert (refusal.sequence, refusal.kind) == (1, "ProtocolError")
    assert server.ask(Again(sequence=1)) == refusal


@pytest.mark.parametrize("header", [NONSENSE, b"\xc1"], ids=["refused", "cut off"])
def test_files_that_come_with_a_message_are_closed(tmp_path, header):
    server = LoneServer(tmp_path / "snapshots")
    reader, writer = os.pipe()
    server.end.send(header, files=[writer])
    os.close(writer)
    assert server.session.serve_one() == (header == NONSENSE)
    assert os.read(reader, 1) == b""
    os.close(reader)
