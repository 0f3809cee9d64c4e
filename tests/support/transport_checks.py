"""Checks that a `Connection` or a listener keeps the promises of `evenstep.transport.base`."""

import os
import threading
from collections.abc import Callable
from typing import Final, TypeAlias, cast

from evenstep.transport.base import Connection, ConnectionLostError, Message, SilentError
from evenstep.transport.listen import StreamListener

Connected: TypeAlias = Callable[[], tuple[Connection, Connection]]
"""Makes the two ends of a new connection."""

_SECONDS: Final = 30.0
_SENDERS: Final = 4
_MESSAGES: Final = 100
_BIG_BYTES: Final = 8_000_000
_HEADER: Final = bytes(range(256))


def check_connection(connected: Connected) -> None:
    """Raise AssertionError if a connection that `connected` makes breaks a promise of the interface."""
    for check in (
        _check_headers,
        _check_payload,
        _check_wrong_room,
        _check_unread_payload,
        _check_silence,
        _check_refusals,
        _check_files,
        _check_senders,
        _check_both_ways,
        _check_close_wakes,
        _check_closed_by_peer,
        _check_closed_here,
    ):
        one, other = connected()
        try:
            check(one, other)
            check(other, one)  # The last checks close the connection and accept a closed one.
        finally:
            one.close()
            other.close()


def check_listener(listen: Callable[[], StreamListener], connect: Callable[[StreamListener], Connection]) -> None:
    """Raise AssertionError if a listener that `listen` makes breaks a promise of the interface.

    `connect` makes a connection to the given listener.
    """
    listener = listen()
    assert listener.addresses, "a listener without an address cannot be reached"
    clients = [connect(listener) for _ in range(3)]
    servers = [listener.accept() for _ in clients]
    for number, client in enumerate(clients):
        client.send(str(number).encode())
    numbers = sorted(server.receive(_SECONDS).header.decode() for server in servers)
    assert numbers == ["0", "1", "2"], f"three peers that sent 0, 1 and 2 are heard as {numbers}"
    unmet = connect(listener)
    _check_accept_wakes(listener)
    _expect(ConnectionLostError, lambda: unmet.receive(_SECONDS), "a peer of a closed listener still waits")
    listener.close()
    _expect(ConnectionLostError, lambda: connect(listener), "a closed listener takes connections")
    servers[0].send(b"still")
    for connection in (*clients, *servers, unmet):
        connection.close()


def _check_headers(one: Connection, other: Connection) -> None:
    for header in (b"\0", _HEADER, _HEADER * 200):
        one.send(header)
        received = other.receive(_SECONDS)
        assert received == Message(header=header), f"{header!r} arrived as {received}"


def _check_payload(one: Connection, other: Connection) -> None:
    parts = [b"", bytes(range(256)) * 300, b"x"]
    one.send(b"parts", *(memoryview(part) for part in parts))
    one.send(b"next")
    message = other.receive(_SECONDS)
    assert message.payload_bytes == 256 * 300 + 1, f"76801 bytes are announced as {message.payload_bytes}"
    rooms = [bytearray(1000), bytearray(), bytearray(256 * 300 + 1 - 1000)]
    other.receive_payload(*(memoryview(room) for room in rooms))
    assert b"".join(rooms) == b"".join(parts), "a payload arrived as other bytes"
    assert other.receive(_SECONDS).header == b"next", "the message after a payload was lost"
    one.send(b"words", _words((2, 5)))
    assert other.receive(_SECONDS).payload_bytes == 80, "an array of two dimensions must count in bytes"
    other.receive_payload(_words((10,)))


def _words(shape: tuple[int, ...]) -> memoryview:
    """80 bytes as ten numbers of this shape."""
    return cast("memoryview", memoryview(bytearray(80)).cast("d", shape))


def _check_wrong_room(one: Connection, other: Connection) -> None:
    one.send(b"-", memoryview(b"abcd"))
    other.receive(_SECONDS)
    for size in (0, 3, 5):
        room = memoryview(bytearray(size))
        _expect(ValueError, lambda room=room: other.receive_payload(room), f"4 bytes were read into {size}")  # type: ignore[misc]
    _expect(ValueError, lambda: other.receive_payload(memoryview(b"1234")), "a payload was read into constant memory")
    right = bytearray(4)
    other.receive_payload(memoryview(right))
    assert right == b"abcd", "nothing may be read into buffers of another size"
    _expect(ValueError, lambda: other.receive_payload(memoryview(right)), "a payload was read twice")


def _check_unread_payload(one: Connection, other: Connection) -> None:
    one.send(b"first", memoryview(bytes(300_000)))
    one.send(b"second", memoryview(b"ab"))
    other.receive(_SECONDS)
    assert other.receive(_SECONDS).header == b"second", "the unread part of a payload must be discarded"


def _check_silence(one: Connection, other: Connection) -> None:
    for timeout in (0.0, 0.01):
        _expect(SilentError, lambda timeout=timeout: other.receive(timeout), "a message arrived from a silent peer")  # type: ignore[misc]
    one.send(b"now")
    assert other.receive(_SECONDS).header == b"now", "a message after a timeout was lost"


def _check_refusals(one: Connection, other: Connection) -> None:
    _expect(ValueError, lambda: one.send(b""), "an empty header was sent")
    _expect(ValueError, lambda: one.send(bytes(2**24)), "a header of 16 MiB was sent")
    scattered = memoryview(bytearray(10))[::2]
    _expect(ValueError, lambda: one.send(b"-", scattered), "a buffer that is not contiguous was sent")
    one.send(b"now")
    assert other.receive(_SECONDS) == Message(header=b"now"), "a refused message changed the connection"


def _check_files(one: Connection, other: Connection) -> None:
    reader, writer = os.pipe()
    try:
        if not one.local:
            _expect(ValueError, lambda: one.send(b"-", files=[writer]), "a file was sent to another host")
            return
        one.send(b"before")
        one.send(b"file", memoryview(b"payload"), files=[writer, writer])
        one.send(b"behind")
        counts = []
        for _ in range(3):
            message = other.receive(_SECONDS)
            counts.append(len(message.files))
            for descriptor in message.files:
                os.write(descriptor, b"x")
                os.close(descriptor)
        assert counts == [0, 2, 0], f"a message with two files between others arrived with {counts}"
        assert os.read(reader, 10) == b"xx", "another file arrived than was sent"
        _expect(ValueError, lambda: one.send(b"-", files=[writer] * 1000), "a thousand files were sent")
    finally:
        os.close(reader)
        os.close(writer)


def _check_senders(one: Connection, other: Connection) -> None:
    def send(sender: int) -> None:
        for number in range(_MESSAGES):
            one.send(f"{sender} {number}".encode(), memoryview(bytes([sender]) * (1000 * number)))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(_SENDERS)]
    for thread in threads:
        thread.start()
    heard: list[list[object]] = [[] for _ in threads]
    for _ in range(_SENDERS * _MESSAGES):
        message = other.receive(_SECONDS)
        sender, number = map(int, message.header.split())
        room = bytearray(message.payload_bytes)
        other.receive_payload(memoryview(room))
        assert room == bytes([sender]) * len(room), "the messages of two threads were mixed"
        heard[sender].append(number)
    for thread in threads:
        thread.join()
    assert heard == [list(range(_MESSAGES))] * _SENDERS, "the messages of a thread arrived in another order"


def _check_both_ways(one: Connection, other: Connection) -> None:
    content = bytes(range(250)) * (_BIG_BYTES // 250)
    senders = [threading.Thread(target=end.send, args=(b"-", memoryview(content))) for end in (one, other)]
    rooms = [bytearray(_BIG_BYTES) for _ in senders]

    def receive(end: Connection, room: bytearray) -> None:
        end.receive(_SECONDS)
        end.receive_payload(memoryview(room))

    receivers = [threading.Thread(target=receive, args=pair) for pair in zip((one, other), rooms, strict=True)]
    for thread in (*senders, *receivers):
        thread.start()
    for thread in (*senders, *receivers):
        thread.join()
    assert all(room == content for room in rooms), "payloads that crossed arrived as other bytes"


def _check_close_wakes(one: Connection, other: Connection) -> None:
    _check_woken(one, one.close, "closing a connection must wake the thread that receives from it")
    _check_woken(other, one.close, "closing a connection must wake the peer's receiving thread")


def _check_woken(waiting: Connection, close: Callable[[], None], what: str) -> None:
    lost = threading.Event()

    def receive() -> None:
        try:
            waiting.receive()
        except ConnectionLostError:
            lost.set()

    thread = threading.Thread(target=receive)
    thread.start()
    close()
    thread.join(_SECONDS)
    assert lost.is_set(), what


def _check_closed_by_peer(one: Connection, other: Connection) -> None:
    one.close()
    _expect(ConnectionLostError, lambda: other.receive(_SECONDS), "a message arrived from a closed connection")

    def send_much() -> None:
        for _ in range(100):
            other.send(b"-", memoryview(bytes(100_000)))

    _expect(ConnectionLostError, send_much, "a message can be sent to a peer that has closed")


def _check_closed_here(one: Connection, other: Connection) -> None:
    one.close()
    one.close()
    _expect(ConnectionLostError, lambda: one.send(b"-"), "a closed connection can send")
    _expect(ConnectionLostError, lambda: one.receive(0.0), "a closed connection can receive")
    other.close()


def _check_accept_wakes(listener: StreamListener) -> None:
    """Closing wakes two accepting threads, or refuses them if they call later; one waiting peer may still arrive."""
    lost = threading.Semaphore(0)

    def accept() -> None:
        try:
            while True:
                listener.accept().close()
        except ConnectionLostError:
            lost.release()

    threads = [threading.Thread(target=accept) for _ in range(2)]
    for thread in threads:
        thread.start()
    listener.close()
    for thread in threads:
        thread.join(_SECONDS)
        assert lost.acquire(blocking=False), "closing a listener must wake the threads that accept"


def _expect(error: type[Exception], act: Callable[[], object], what: str) -> None:
    try:
        act()
    except error:
        return
    raise AssertionError(what)
