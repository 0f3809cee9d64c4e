"""The thread that serves all workers of a host, with one among them that stands still."""

import socket
import threading
from contextlib import contextmanager

import msgspec
import pytest

from evenstep.core.activity import Doing
from evenstep.launch.server_settings import ServerSettings
from evenstep.protocol.encoding import encode
from evenstep.protocol.messages import Absent, Ping, Pong
from evenstep.server.local_poller import LocalPoller
from evenstep.server.rendezvous import Rendezvous
from evenstep.server.requests import Service
from evenstep.server.session import ServerSession
from evenstep.server.shard_state import ShardState
from evenstep.transport.base import ConnectionLostError
from evenstep.transport.stream import StreamConnection
from evenstep.transport.wire import Wire

SECONDS = 30.0
PING = encode(Ping(doing=Doing.WAITING, iteration=0, seconds=0.0, echo=True))


def connection_over(sock, patience_seconds=2 * SECONDS):
    return StreamConnection(Wire(sock, patience_seconds=patience_seconds))


@pytest.fixture
def opened(tmp_path):
    """Opens a new connection at a local poller, and gives its other end as a bare socket."""
    made = []

    def opened(poller):
        ours, theirs = socket.socketpair()
        connection = connection_over(ours)
        made.append(connection)
        poller.open(connection, ServerSession(connection, service))
        return theirs

    service = Service(
        shard_state=ShardState(ServerSettings(count=2, workers=2, snapshots=tmp_path, index=1)),
        primary=None,
        rendezvous=Rendezvous(2),
        lock=threading.Lock(),
    )
    yield opened
    for connection in made:
        connection.close()


@contextmanager
def serving(poller):
    """The local poller serves in a thread of its own."""
    ended = threading.Event()

    def serve():
        while not ended.is_set():
            poller.serve(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def assert_served(peer):
    peer.send(PING)
    assert peer.receive(SECONDS).header == encode(Pong())


def test_a_worker_that_stops_in_the_middle_of_a_message_is_lost_and_the_next_is_served(opened):
    poller = LocalPoller(patience_seconds=0.05)
    stopped, other = opened(poller), opened(poller)
    stopped.sendall(b"EVST")
    with serving(poller), stopped, connection_over(other) as peer:
        stopped.settimeout(SECONDS)
        assert stopped.recv(1) == b"", "it must see that it was dropped"
        assert_served(peer)


def send_for_ever(connection, message):
    while True:
        connection.send(message)


@pytest.mark.parametrize("asked", [PING, encode(Absent()), msgspec.msgpack.encode({"op": "nonsense"})])
def test_a_worker_that_reads_no_answers_is_lost_and_the_next_is_served(opened, asked):
    poller = LocalPoller()
    deaf, other = opened(poller), opened(poller)
    # The local poller would wait for longer than the one that speaks to it does.
    with serving(poller), connection_over(deaf, SECONDS) as speaker, connection_over(other) as peer:
        with pytest.raises(ConnectionLostError, match="to the peer was lost"):
            send_for_ever(speaker, asked)
        assert_served(peer)


class Hears:
    """A session that hears of the end of its connection."""

    def __init__(self, connection):
        self.connection = connection
        self.lost = threading.Event()

    def serve_one(self):
        try:
            self.connection.receive()
        except ConnectionLostError:
            self.connection.close()
            self.lost.set()
            return False
        return True


class Answers(Hears):
    """A session that answers another worker than the one that asks, as one does who was waited for."""

    def __init__(self, connection, other, worker):
        super().__init__(connection)
        self.other = other
        self.worker = worker
        self.failed = False

    def serve_one(self):
        going_on = super().serve_one()
        if going_on:
            self.worker.close()  # It dies at this moment, so that its end has not been noticed before.
            try:
                self.other.send(b"-")
            except ConnectionLostError:
                self.failed = True
        return going_on


def test_a_worker_that_is_found_dead_when_it_is_sent_an_answer_is_lost_at_once():
    poller = LocalPoller()
    (ours, worker), (other_ours, other) = socket.socketpair(), socket.socketpair()
    hears = Hears(connection_over(ours))
    answers = Answers(connection_over(other_ours), hears.connection, worker)
    poller.open(hears.connection, hears)
    poller.open(answers.connection, answers)
    with serving(poller), connection_over(other) as peer, hears.connection, answers.connection:
        peer.send(b"-")
        assert hears.lost.wait(SECONDS)
        assert answers.failed
