"""What a stream does with a peer that sends half a message, none, or more than it should."""

import array
import contextlib
import os
import random
import socket
import struct
import threading
import time

import psutil
import pytest

from evenstep.transport.base import ConnectionLostError, SilentError
from evenstep.transport.codec import MAX_FILES, PREFIX_BYTES, Limits, Prefix
from evenstep.transport.stream import StreamConnection
from evenstep.transport.wire import Wire

LIMITS = Limits(header_bytes=4096, payload_bytes=10**6, patience_seconds=0.05)
ENCODED = b"header"
FRAME = Prefix(header_bytes=len(ENCODED), payload_bytes=5, files=0).encode() + ENCODED + b"bytes"
CONNECTIONS = 2_000


@pytest.fixture
def raw_peer():
    """Makes a bare socket and the connection at its other end."""
    made = []

    def raw_peer(limits=LIMITS):
        ours, theirs = socket.socketpair()
        connection = StreamConnection(Wire(ours, patience_seconds=limits.patience_seconds), limits=limits)
        made.extend((theirs, connection))
        return theirs, connection

    yield raw_peer
    for end in made:
        end.close()


def test_a_peer_that_says_nothing_is_silent_but_one_that_stops_in_a_message_is_lost(raw_peer):
    for length in (1, PREFIX_BYTES - 1, PREFIX_BYTES, PREFIX_BYTES + 1):
        peer, connection = raw_peer()
        with pytest.raises(SilentError):
            connection.receive(0.0)
        peer.sendall(FRAME[:length])
        with pytest.raises(ConnectionLostError, match="silent in the middle"):
            connection.receive(30.0)
        with pytest.raises(ConnectionLostError, match="was closed"):
            connection.receive(30.0)
        assert peer.recv(1) == b"", "the peer must see that it was dropped"


def test_a_peer_that_stops_in_the_payload_is_lost(raw_peer):
    peer, connection = raw_peer()
    peer.sendall(FRAME[:-1])
    assert connection.receive(30.0).payload_bytes == 5
    with pytest.raises(ConnectionLostError, match="silent in the middle"):
        connection.receive_payload(memoryview(bytearray(5)))


def test_a_peer_that_is_gone_in_the_middle_of_a_message_is_lost(raw_peer):
    peer, connection = raw_peer()
    peer.sendall(FRAME + FRAME[:25])
    peer.close()
    connection.receive(30.0)
    with pytest.raises(ConnectionLostError, match="gone in the middle of a message"):
        connection.receive(30.0)


def test_a_peer_that_takes_nothing_in_is_lost(raw_peer):
    _, connection = raw_peer()
    with pytest.raises(ConnectionLostError, match="took in nothing more"):
        connection.send(b"-", memoryview(bytes(2**26)))


def test_a_message_that_trickles_in_is_read(raw_peer):
    peer, connection = raw_peer(Limits(patience_seconds=30.0))

    def trickle():
        for byte in FRAME * 3:
            peer.send(bytes([byte]))

    thread = threading.Thread(target=trickle)
    thread.start()
    for _ in range(3):
        assert connection.receive(30.0).header == ENCODED
        room = bytearray(5)
        connection.receive_payload(memoryview(room))
        assert room == b"bytes"
    thread.join()


def test_thousands_of_connections_that_send_rubbish_are_closed_each_and_memory_stays_flat(raw_peer):
    draw = random.Random(1)
    process = psutil.Process()
    before = process.memory_info().rss
    for _ in range(CONNECTIONS):
        ours, peer = socket.socketpair()
        connection = StreamConnection(Wire(ours, patience_seconds=5.0), limits=LIMITS)
        whole = draw.randrange(3)
        peer.sendall(FRAME * whole + rubbish(draw))
        peer.shutdown(socket.SHUT_WR)
        for _ in range(whole):
            connection.receive(30.0)
        with pytest.raises(ConnectionLostError):
            connection.receive(30.0)
        with pytest.raises(ConnectionLostError, match="was closed"):
            connection.receive(30.0)
        peer.close()
    assert process.memory_info().rss - before < 20_000_000


def rubbish(draw):
    kind = draw.randrange(4)
    if kind == 0:
        return draw.randbytes(draw.randrange(1, 200))
    if kind == 1:
        return FRAME[: draw.randrange(1, len(FRAME) - 5)]
    if kind == 2:
        return struct.pack("!4sHHIQ", b"EVST", 1, 0, draw.randrange(4097, 2**32), draw.randrange(2**63)) + bytes(500)
    return Prefix(header_bytes=50, payload_bytes=0, files=0).encode() + draw.randbytes(draw.randrange(50))


def frame_with_files(announced):
    return Prefix(header_bytes=len(ENCODED), payload_bytes=0, files=announced).encode() + ENCODED


def send_with_files(peer, content, files):
    peer.sendmsg([content], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])


def is_end_of_pipe(reader):
    """Whether nobody has the writing end open any more."""
    os.set_blocking(reader, False)
    try:
        return os.read(reader, 1) == b""
    except BlockingIOError:
        return False


@pytest.mark.parametrize(
    ("announced", "sent"), [(0, 1), (1, 2), (2, 1), (MAX_FILES, MAX_FILES + 1), (0, 250), (MAX_FILES + 1, 17)]
)
def test_files_that_were_not_announced_so_are_closed_with_the_connection(announced, sent, raw_peer):
    peer, connection = raw_peer()
    reader, writer = os.pipe()
    send_with_files(peer, frame_with_files(announced), [writer] * sent)
    os.close(writer)
    with pytest.raises(ConnectionLostError, match="files"):
        connection.receive(30.0)
    assert is_end_of_pipe(reader)
    os.close(reader)


def test_files_of_a_refused_message_and_of_an_unread_one_are_closed(raw_peer):
    for content in (b"EVSTrubbish" + bytes(30), frame_with_files(1)[:-3]):
        peer, connection = raw_peer()
        reader, writer = os.pipe()
        send_with_files(peer, content, [writer])
        os.close(writer)
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionLostError):
            connection.receive(30.0)
        assert is_end_of_pipe(reader)
        os.close(reader)
    peer, connection = raw_peer()
    reader, writer = os.pipe()
    send_with_files(peer, frame_with_files(1), [writer])
    os.close(writer)
    connection.close()
    assert is_end_of_pipe(reader)
    os.close(reader)


def test_files_hidden_in_a_payload_never_arrive(raw_peer):
    peer, connection = raw_peer()
    reader, writer = os.pipe()
    peer.sendall(FRAME[:-5])
    send_with_files(peer, b"bytes", [writer])
    os.close(writer)
    assert connection.receive(30.0).files == ()
    connection.receive_payload(memoryview(bytearray(5)))
    assert is_end_of_pipe(reader)
    os.close(reader)


def test_files_arrive_closed_to_programs_that_are_started(connected):
    client, server = connected("unix")
    reader, writer = os.pipe()
    client.send(b"-", files=[writer])
    (received,) = server.receive(30.0).files
    assert not os.get_inheritable(received)
    for descriptor in (reader, writer, received):
        os.close(descriptor)


def send_too_much(client, nbytes=10**6 + 1):
    """The receiver may have gone before all of it is on its way."""
    with contextlib.suppress(ConnectionLostError):
        client.send(b"-", memoryview(bytes(nbytes)))


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
def test_a_payload_beyond_the_limit_is_refused_by_the_receiver(kind, connected):
    client, server = connected(kind, limits=LIMITS)
    sender = threading.Thread(target=client.send, args=(b"-", memoryview(bytes(1000))))
    sender.start()
    assert server.receive(30.0).payload_bytes == 1000
    sender.join()
    sender = threading.Thread(target=send_too_much, args=(client,))
    sender.start()
    with pytest.raises(ConnectionLostError, match="payload of 1000001 bytes"):
        server.receive(30.0)
    sender.join()


def test_many_small_buffers_arrive_as_one_payload(connected):
    client, server = connected("unix")
    client.send(b"-", *(memoryview(bytes([number % 256])) for number in range(3000)))
    room = bytearray(server.receive(30.0).payload_bytes)
    server.receive_payload(memoryview(room))
    assert room == bytes(number % 256 for number in range(3000))


def test_messages_that_came_together_over_tcp_are_received_one_by_one():
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as peer:
        connection = StreamConnection(Wire(door.accept()[0], patience_seconds=30.0))
        with connection:
            peer.sendall(FRAME * 3)
            peer.shutdown(socket.SHUT_WR)
            buffer = bytearray(5)
            assert connection.receive(30.0).payload_bytes == 5
            connection.receive_payload(memoryview(buffer))
            assert buffer == b"bytes"
            for _ in range(2):
                # Its payload is thrown away, and what is already here counts as having come.
                assert connection.receive(0.0).header == ENCODED
            with pytest.raises(ConnectionLostError, match="has closed"):
                connection.receive(0.0)


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
def test_after_a_send_that_failed_what_had_come_is_received_and_then_the_loss(kind, connected):
    client, server = connected(kind)
    client.send(b"last words")
    client.close()
    with pytest.raises(ConnectionLostError):
        send_for_ever(server)
    assert server.fileno() >= 0, "a selector that waits on it would not be woken"
    assert server.receive(30.0).header == b"last words"
    with pytest.raises(ConnectionLostError):
        server.receive(30.0)
    assert server.fileno() == -1


def send_for_ever(connection, **options):
    while True:
        connection.send(b"more", memoryview(bytes(1000)), **options)


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
def test_a_send_that_is_not_to_wait_does_not_wait_for_a_peer_that_reads_nothing(kind, connected):
    patience = 60.0
    _, server = connected(kind, limits=Limits(patience_seconds=patience))
    began = time.monotonic()
    with pytest.raises(ConnectionLostError, match="took in nothing more"):
        send_for_ever(server, wait=False)
    assert time.monotonic() - began < patience / 2


class Turn:
    """The lock of a connection's senders. `taken`: by another thread, which sends its message once this one waits."""

    def __init__(self):
        self.lock, self.taken, self.asked = threading.Lock(), threading.Event(), threading.Event()
        self.other = threading.Thread(target=self.take)

    def take(self):
        with self.lock:
            self.taken.set()
            self.asked.wait(30.0)

    def acquire(self, *arguments, **options):
        if not self.asked.is_set():
            self.other.start()
            self.taken.wait(30.0)
            self.asked.set()
        return self.lock.acquire(*arguments, **options)

    __enter__ = acquire

    def __exit__(self, *_):
        self.release()

    def release(self):
        self.lock.release()


def test_a_send_that_is_not_to_wait_waits_for_its_turn(raw_peer):
    """A server may answer a worker's question in one thread while a commit in another releases the same worker."""
    peer, connection = raw_peer()
    connection._sending = turn = Turn()
    connection.send(b"released", wait=False)
    turn.other.join()
    assert peer.recv(100).endswith(b"released")


def test_a_send_that_is_not_to_wait_does_not_wait_for_another_one_that_waits_for_the_peer(raw_peer):
    peer, connection = raw_peer(Limits(patience_seconds=60.0))
    much = threading.Thread(target=send_too_much, args=(connection, 2**26))
    much.start()
    peer.recv(1)  # The other one is in the middle of its message.
    with pytest.raises(ConnectionLostError, match="took in nothing more"):
        connection.send(b"-", wait=False)
    much.join()
