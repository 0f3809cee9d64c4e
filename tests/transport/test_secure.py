"""Who does not know the secret is not let in, cannot pose as the server, and cannot keep others out."""

import contextlib
import random
import socket
import ssl
import sys
import threading

import psutil
import pytest

from evenstep.core.errors import ConfigError
from evenstep.transport.base import ConnectionLostError
from evenstep.transport.certificate import Certificate, client_context
from evenstep.transport.connect import connect
from evenstep.transport.listen import listen
from evenstep.transport.secure import Deadline, admit

SCHEMES = ("unix", "tcp", "tls")
WRONG = bytes(32)


def of_scheme(listener, scheme):
    return [address for address in listener.addresses if address.startswith(scheme)]


def assert_serves(listener, scheme, secret):
    with connect(of_scheme(listener, scheme), secret=secret) as client, listener.accept() as server:
        client.send(b"question")
        assert server.receive(30.0).header == b"question"
        server.send(b"answer")
        assert client.receive(30.0).header == b"answer"


def raw_socket(listener, scheme):
    """A socket connected to the listener, with nothing said yet."""
    (address,) = of_scheme(listener, scheme)
    if scheme == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect("\0" + address.removeprefix("unix:@"))
    else:
        host, _, port = address.removeprefix(f"{scheme}://").rpartition(":")
        sock = socket.create_connection((host, int(port)))
    sock.settimeout(60.0)
    return sock


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_wrong_secret_is_refused_and_the_right_one_served(scheme, host_of, secret):
    with listen(host_of(scheme), secret=secret) as listener:
        with pytest.raises(ConnectionLostError, match="the server refused: give both sides the same secret"):
            connect(of_scheme(listener, scheme), secret=WRONG)
        assert_serves(listener, scheme, secret)


@pytest.mark.parametrize("secret", [b"", b"x" * 15])
def test_a_secret_that_could_be_guessed_is_refused(secret):
    with pytest.raises(ConfigError, match="use at least 16"):
        listen(secret=secret)
    with pytest.raises(ConfigError, match="use at least 16"):
        connect(["tcp://127.0.0.1:1"], secret=secret)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_peers_that_stall_or_send_rubbish_keep_nobody_out(scheme, host_of, secret):
    draw = random.Random(2)
    with listen(host_of(scheme), secret=secret) as listener, contextlib.ExitStack() as stack:
        for number in range(200):
            peer = stack.enter_context(raw_socket(listener, scheme))
            if number % 2:
                with contextlib.suppress(OSError):
                    peer.sendall(draw.randbytes(draw.randrange(1, 300)))
        assert_serves(listener, scheme, secret)


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
def test_thousands_of_strangers_leave_memory_flat_and_the_service_up(scheme, secret):
    draw = random.Random(3)
    process = psutil.Process()
    with listen(secret=secret) as listener:
        assert_serves(listener, scheme, secret)
        before = process.memory_info().rss
        for _ in range(1_000):
            with raw_socket(listener, scheme) as peer, contextlib.suppress(OSError):
                peer.sendall(draw.randbytes(draw.choice((1, 63, 64, 65, 4000))))
        assert_serves(listener, scheme, secret)
        assert process.memory_info().rss - before < 40_000_000


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_peer_that_says_nothing_is_dropped(scheme, host_of, secret):
    with listen(host_of(scheme), secret=secret, admit_seconds=0.05) as listener, raw_socket(listener, scheme) as peer:
        while peer.recv(1000):
            pass


def serve_once(door, serve):
    def run():
        sock, _ = door.accept()
        with sock, contextlib.suppress(OSError):
            serve(sock)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_what_another_client_has_said_cannot_be_said_again(secret):
    overheard = []

    def pose(sock):
        with raw_socket(listener, "tcp") as there:
            sock.sendall(there.recv(1000))
        overheard.append(sock.recv(64, socket.MSG_WAITALL))

    with listen(secret=secret) as listener, socket.create_server(("127.0.0.1", 0)) as door:
        thread = serve_once(door, pose)
        with pytest.raises(ConnectionLostError):
            connect([f"tcp://127.0.0.1:{door.getsockname()[1]}"], secret=secret)
        thread.join()
        with raw_socket(listener, "tcp") as peer:
            assert len(peer.recv(1000)) == 42
            peer.sendall(overheard[0])
            with contextlib.suppress(ConnectionError):
                assert peer.recv(1000) == b"", "a proof was taken twice"


def test_a_server_that_does_not_know_the_secret_is_found_out(secret):
    def pose(sock):
        sock.sendall(b"evenstep" + b"\0\1" + bytes(32))
        assert len(sock.recv(64, socket.MSG_WAITALL)) == 64
        sock.sendall(bytes(32))

    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = serve_once(door, pose)
        with pytest.raises(ConnectionLostError, match="the server does not know the secret"):
            connect([f"tcp://127.0.0.1:{door.getsockname()[1]}"], secret=secret)
        thread.join()


@pytest.mark.parametrize(
    ("greeting", "what"),
    [
        (b"HTTP/1.1 400 Bad Request, and so on and so forth", "not an evenstep server"),
        (b"evenstep" + b"\0\2" + bytes(32), "version 2 of the protocol"),
        (b"even", "gone before"),
    ],
)
def test_what_listens_there_but_is_no_server_is_said(greeting, what, secret):
    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = serve_once(door, lambda sock: sock.sendall(greeting))
        with pytest.raises(ConnectionLostError, match=what):
            connect([f"tcp://127.0.0.1:{door.getsockname()[1]}"], secret=secret)
        thread.join()


def test_a_server_that_stalls_costs_the_time_given_and_no_more(secret):
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = f"tcp://127.0.0.1:{door.getsockname()[1]}"
        with pytest.raises(ConnectionLostError, match="timed out"):
            connect([address], secret=secret, timeout=0.05)


def test_a_man_in_the_middle_of_an_encrypted_line_is_found_out_by_both(host_of, secret):
    """He decrypts with a certificate of his own and passes on every byte of the two proofs."""
    host = host_of("tls")
    with listen(host, secret=secret, local=False) as listener, socket.create_server((host, 0)) as door:

        def relay(sock):
            own = Certificate.create().context.wrap_socket(sock, server_side=True)
            with own, client_context().wrap_socket(raw_socket(listener, "tls")) as there:
                own.sendall(there.recv(1000))
                there.sendall(own.recv(1000))
                own.sendall(there.recv(1000))

        thread = serve_once(door, relay)
        with pytest.raises(ConnectionLostError, match="the server refused"):
            connect([f"tls://{host}:{door.getsockname()[1]}"], secret=secret)
        thread.join()
        assert_serves(listener, "tls", secret)


def test_a_client_detects_a_server_with_the_secret_but_another_certificate(host_of, secret):
    host = host_of("tls")
    certificate, other = Certificate.create(), Certificate.create()
    with socket.create_server((host, 0)) as door:

        def serve(sock):
            with certificate.context.wrap_socket(sock, server_side=True) as own:
                admit(own, secret=secret, certificate=other.der, deadline=Deadline(60.0))

        thread = serve_once(door, serve)
        with pytest.raises(ConnectionLostError):
            connect([f"tls://{host}:{door.getsockname()[1]}"], secret=secret)
        thread.join()


def test_beyond_loopback_nothing_goes_in_the_plain(host_of, secret):
    host = host_of("tls")
    with listen(host, secret=secret) as listener:
        assert [address.split(":")[0] for address in listener.addresses] == ["unix", "tls"]
        (address,) = of_scheme(listener, "tls")
        with pytest.raises(ConfigError, match="would not be encrypted"):
            connect([address.replace("tls", "tcp")], secret=secret)
        with raw_socket(listener, "tls") as peer:
            context = client_context()
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
            with pytest.raises(OSError, match="version"):
                context.wrap_socket(peer)


def test_without_the_package_that_encrypts_one_sentence_says_what_to_install(host_of, secret, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match="pip install cryptography"):
        listen(host_of("tls"), secret=secret)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_host_that_nobody_can_connect_to_is_refused(host, secret):
    with pytest.raises(ConfigError, match="peers cannot connect to"):
        listen(host, secret=secret)


@pytest.mark.parametrize("host", ["no name", "192.0.2.1"])
def test_a_host_that_is_not_this_one_is_refused(host, secret):
    with pytest.raises(ConfigError, match=f"this host cannot listen on '{host}'.*: give its own host name or address"):
        listen(host, secret=secret)


def test_a_unix_socket_that_is_not_of_this_host_is_passed_over(secret):
    with listen(secret=secret) as listener:
        unix, tcp = listener.addresses
        assert unix.startswith("unix:@evenstep-")
        with connect([unix + "0", tcp], secret=secret) as client, listener.accept() as server:
            assert not client.local
            assert not server.local
        with connect(listener.addresses, secret=secret) as client, listener.accept() as server:
            assert client.local
            assert server.local


def test_where_no_address_works_the_reason_is_said_for_each(secret):
    with listen(secret=secret) as listener:
        gone = listener.addresses
    with pytest.raises(ConnectionLostError) as caught:
        connect(gone, secret=secret)
    assert all(f"{address}: Connection refused" in str(caught.value) for address in gone)
    with pytest.raises(ConnectionLostError, match="no addresses"):
        connect([], secret=secret)


@pytest.mark.parametrize("address", ["", "host:1", "tcp://host", "http://host:1", "unix:@", "unix:/tmp/x", "tcp://h:x"])
def test_what_is_no_address_is_refused(address, secret):
    with pytest.raises(ConfigError, match="invalid address"):
        connect([address], secret=secret)


def test_a_listener_at_an_ipv6_address_is_reached(secret):
    with contextlib.suppress(ConfigError), listen("::1", secret=secret, local=False) as listener:
        assert listener.addresses[0].startswith("tcp://[::1]:")
        assert_serves(listener, "tcp", secret)
