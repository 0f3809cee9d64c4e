"""Every wait of a worker for its servers has a limit, whatever they say meanwhile; in a time that jumps."""

import threading
from contextlib import contextmanager, suppress

import pytest
from support.clocks import FakeClock
from support.in_memory import connected_pair

from evenstep.core.errors import ProtocolError, WorkerLostError
from evenstep.protocol.encoding import decode, encode
from evenstep.protocol.messages import (
    ASKED,
    Again,
    Grant,
    NumberedReply,
    Pending,
    Ping,
    Placed,
    Pong,
    Refusal,
    Resend,
    Rest,
    Stage,
    Staged,
    Start,
)
from evenstep.transport.base import ConnectionLostError, SilentError
from evenstep.worker.servers.link import MAX_TRIES, ServerLink
from evenstep.worker.servers.replies import ASK_AGAIN

HEARTBEAT_SECONDS, TIMEOUT_SECONDS = 2.0, 60.0
PLACE = Placed(incarnation=1, heartbeat=HEARTBEAT_SECONDS, nbytes=0, version=0)
OVER = NumberedReply(sequence=1, weights=False, version=0, body=Grant(claims=(), over=True))


class Server:
    """Gives a worker its place, and else answers with what `answer` makes of a request, or nothing."""

    def __init__(self, answer, lines=1):
        self.answer = answer
        self.clock = FakeClock(threads=1 + lines)
        self.free = []
        self.threads = []
        for _ in range(lines):
            one, other = connected_pair(clock=self.clock)
            self.free.append(one)
            self.threads.append(threading.Thread(target=self.serve, args=(other,)))

    def serve(self, line):
        try:
            while self.clock.now() < 20 * TIMEOUT_SECONDS:  # So that a wait without a limit ends, too.
                asked = decode(ASKED, line.receive().header)
                answer = PLACE if isinstance(asked, Start) else self.answer(asked)
                if answer is not None:
                    line.send(encode(answer))
        except ConnectionLostError:
            pass
        line.close()
        self.clock.leave()


@contextmanager
def linked(server, shards=1):
    for thread in server.threads:
        thread.start()
    link = ServerLink(
        0,
        lambda shard: server.free.pop(),
        shards,
        timeout_seconds=TIMEOUT_SECONDS,
        clock=server.clock.now,
        wait=lambda seconds: None,
    )
    try:
        link.start(b"", [0] * shards)
        yield link
    finally:
        link.close()
        link._pulse.join()
        for line in server.free:
            line.close()
        for thread in server.threads:
            thread.join()


class SlowToTakeBack(Server):
    """Closes the first line, and on the second one refuses what comes before the worker has its place again."""

    def __init__(self):
        super().__init__(lambda asked: OVER, lines=2)
        self.early = []

    def serve(self, line):
        if isinstance(decode(ASKED, line.receive().header), Start) and not self.early:
            self.early.append(None)
            line.send(encode(PLACE))
            while isinstance(decode(ASKED, line.receive().header), Ping):
                pass
            line.close()
            self.clock.leave()
            return
        with suppress(SilentError):
            self.early.append(line.receive(0.75 * HEARTBEAT_SECONDS).header)
            line.send(encode(Refusal(sequence=0, error="the worker has not started here", kind="ProtocolError")))
        line.send(encode(PLACE))
        super().serve(line)


def test_a_worker_asks_for_no_answer_before_it_has_its_place_again():
    server = SlowToTakeBack()
    with linked(server) as link:
        assert link.ask(Rest()).body.over
    assert server.early == [None]


def test_a_server_that_runs_but_does_not_get_on_is_given_up_after_the_timeout():
    server = Server(lambda asked: Pending(sequence=1, events=7) if isinstance(asked, Again) else None)
    with linked(server) as link:
        with pytest.raises(WorkerLostError, match="server 0 did not answer for 60 s although it runs"):
            link.ask(Rest())
        assert TIMEOUT_SECONDS < server.clock.now() < TIMEOUT_SECONDS + 4 * HEARTBEAT_SECONDS
        with pytest.raises(WorkerLostError):
            link.ask(Rest())


def test_a_server_that_gets_on_is_waited_for_however_long_the_others_take():
    asked = []

    def answer(message):
        if isinstance(message, Again):
            asked.append(message)
            over = len(asked) * HEARTBEAT_SECONDS / 4 > 3 * TIMEOUT_SECONDS
            return OVER if over else Pending(sequence=1, events=len(asked))
        return None

    server = Server(answer)
    with linked(server) as link:
        assert link.ask(Rest()).body.over
        assert server.clock.now() > 2 * TIMEOUT_SECONDS


def test_a_server_that_only_says_that_it_lives_is_given_up_after_the_timeout():
    server = Server(lambda asked: Pong() if isinstance(asked, Again) else None)
    with linked(server) as link, pytest.raises(WorkerLostError, match="although it runs"):
        link.ask(Rest())


def test_a_server_that_never_answers_for_a_state_is_given_up_after_some_tries():
    server = Server(lambda asked: None, lines=MAX_TRIES)
    with linked(server) as link:
        with pytest.raises(WorkerLostError, match="did not answer for 60 s"):
            link.fetch_states()
        assert server.free == []


def test_what_a_server_sent_while_gradients_were_sent_again_counts_as_heard():
    longer = 2 * round(1 / ASK_AGAIN)  # than a heartbeat, in periods
    said = iter([Resend(sequence=1), *[Pong()] * longer, Staged(sequence=1)])

    def answer(message):
        if isinstance(message, Again):
            return next(said, Staged(sequence=1))
        return None if isinstance(message, Stage | Ping) else OVER

    server = Server(answer, lines=2)
    with linked(server, shards=2) as link:
        assert link.ask(Rest(), gradients=True).body.over
        assert server.clock.now() > longer * ASK_AGAIN * HEARTBEAT_SECONDS
        assert link.incarnation == PLACE.incarnation
        assert server.free == []


def test_a_refusal_is_raised_as_the_error_that_it_was():
    refusal = Refusal(sequence=1, error="not now", kind="ProtocolError")
    server = Server(lambda asked: refusal if isinstance(asked, Again) else None)
    with linked(server) as link, pytest.raises(ProtocolError, match="not now"):
        link.ask(Rest())
