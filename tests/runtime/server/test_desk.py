"""The thread that serves all workers of a host, with one among them that stands still."""

import socket
import threading

from evenstep.runtime.server.desk import Desk
from evenstep.runtime.server.meeting import Meeting
from evenstep.runtime.server.replica import Replica
from evenstep.runtime.server.session import Session
from evenstep.runtime.server.snapshots import Snapshots
from evenstep.transport.stream import StreamConnection
from evenstep.transport.wire import SocketWire


def opened(desk, replica):
    """A new connection's other end, as a bare socket."""
    ours, theirs = socket.socketpair()
    connection = StreamConnection(SocketWire(ours, patience_seconds=60.0))
    session = Session(
        connection,
        replica=replica,
        head=None,
        meeting=Meeting(2),
        lock=threading.Lock(),
        workers=2,
        heartbeat_seconds=20.0,
    )
    desk.open(connection, session)
    return theirs


def test_a_worker_that_stops_in_the_middle_of_a_message_is_lost_and_the_next_is_served(tmp_path):
    desk = Desk(patience_seconds=0.05)
    replica = Replica(index=1, count=2, snapshots=Snapshots(tmp_path, 2))
    stopped, other = opened(desk, replica), opened(desk, replica)
    stopped.sendall(b"EVST")
    ended = threading.Event()

    def serve():
        while not ended.is_set():
            desk.serve(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with stopped, StreamConnection(SocketWire(other, patience_seconds=60.0)) as peer:
            stopped.settimeout(60.0)
            assert stopped.recv(1) == b"", "it must see that it was dropped"
            peer.send({"op": "ping", "echo": True})
            assert peer.receive(60.0).header == {"pong": True}
    finally:
        ended.set()
        thread.join()
