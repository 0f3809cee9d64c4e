"""Prefixes from a hostile peer are refused, however many; `tests/protocol/test_messages.py` has the headers."""

import gc
import random
import struct

import psutil
import pytest

from evenstep.transport.base import ConnectionLostError
from evenstep.transport.codec import (
    DEFAULT_LIMITS,
    MAX_FILES,
    PREFIX_BYTES,
    VERSION,
    Limits,
    Prefix,
    check_sendable,
)

PREFIX = Prefix(header_bytes=200, payload_bytes=10**6, files=2)
ROUNDS = 30_000


def refused(decode, *args):
    try:
        decode(*args)
    except ConnectionLostError:
        return True
    return False


def test_a_prefix_comes_back_as_it_was():
    assert Prefix.decode(PREFIX.encode(), DEFAULT_LIMITS) == PREFIX


@pytest.mark.parametrize(
    ("prefix", "what"),
    [
        (struct.pack("!4sHHIQ", b"HTTP", VERSION, 0, 10, 0), "b'HTTP' instead of a message of evenstep"),
        (struct.pack("!4sHHIQ", b"EVST", VERSION + 1, 0, 10, 0), "version 2 of the protocol"),
        (struct.pack("!4sHHIQ", b"EVST", VERSION, 0, 0, 0), "header of 0 bytes"),
        (struct.pack("!4sHHIQ", b"EVST", VERSION, 0, 101, 0), "header of 101 bytes: it must have 1 to 100"),
        (struct.pack("!4sHHIQ", b"EVST", VERSION, 0, 2**32 - 1, 0), "header of 4294967295 bytes"),
        (struct.pack("!4sHHIQ", b"EVST", VERSION, 0, 10, 1001), "payload of 1001 bytes: it must have at most 1000"),
        (struct.pack("!4sHHIQ", b"EVST", VERSION, 0, 10, 2**64 - 1), "payload of 18446744073709551615 bytes"),
        (struct.pack("!4sHHIQ", b"EVST", VERSION, MAX_FILES + 1, 10, 0), "17 files"),
    ],
)
def test_a_prefix_that_announces_what_cannot_be_is_refused_with_the_reason(prefix, what):
    with pytest.raises(ConnectionLostError, match=what):
        Prefix.decode(prefix, Limits(header_bytes=100, payload_bytes=1000))


def test_ten_thousands_of_broken_prefixes_are_refused_and_leave_no_memory_behind():
    draw = random.Random(0)
    prefix = PREFIX.encode()
    process = psutil.Process()
    before = process.memory_info().rss
    outcomes = 0
    for _ in range(ROUNDS):
        damaged = bytearray(prefix)
        damaged[draw.randrange(8)] ^= draw.randint(1, 255)
        outcomes += refused(Prefix.decode, damaged, DEFAULT_LIMITS)
    gc.collect()
    assert outcomes > 0.8 * ROUNDS, "only the number of files, up to its limit, can change without being seen"
    assert process.memory_info().rss - before < 8_000_000


@pytest.mark.parametrize("header", [b"", bytes(2**16 + 1)])
def test_a_header_that_cannot_be_sent_is_refused_by_the_sender(header):
    with pytest.raises(ValueError, match="send large values as payload"):
        check_sendable(header, ())


def test_the_prefix_has_a_fixed_size():
    assert len(PREFIX.encode()) == PREFIX_BYTES == 20
