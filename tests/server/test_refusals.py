"""What a server cannot do is answered with an error, which reaches the worker even where its line breaks."""

import pytest
from support.lone_server import SECONDS, LoneServer

TOO_EARLY = {"op": "rest", "seq": 1, "has": -1}
"""Before the worker has begun an epoch."""


@pytest.mark.parametrize("asked", [TOO_EARLY, {"op": "again", "seq": 1}], ids=["the same", "the answer"])
def test_a_refusal_that_is_lost_with_the_line_is_sent_again_when_the_worker_is_back_and_asks(tmp_path, asked):
    server = LoneServer(tmp_path / "snapshots", local=False)
    server.end.send(TOO_EARLY)
    server.end.close()
    while server.session.serve_one():
        pass
    assert server.connect(server.incarnation)["incarnation"] == server.incarnation
    server.end.send(asked)
    assert server.session.serve_one()
    refusal = server.end.receive(SECONDS).header
    assert (refusal["answer"], refusal["kind"]) == (1, "ProtocolError")


def test_a_refusal_is_of_its_request_alone(tmp_path):
    server = LoneServer(tmp_path / "snapshots", local=False)
    refusal = server.ask(TOO_EARLY)
    assert "worker 0" in refusal["error"]
    begin = {"op": "begin", "number": 0, "epoch": 0, "ahead": 0, "has": -1}
    assert server.ask({**begin, "seq": 2})["initialise"]


def test_a_refusal_of_what_has_no_number_is_not_kept(tmp_path):
    server = LoneServer(tmp_path / "snapshots", local=False)
    assert "error" in server.ask({"op": "nonsense"})
    server.end.send(TOO_EARLY)
    server.session.serve_one()
    assert server.end.receive(SECONDS).header["answer"] == 1
