"""Frames from a hostile peer are refused, however many, and make nothing of their announced size."""

import gc
import random
import struct
import tracemalloc

import msgpack
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
    decode_header,
    encode_header,
)

HEADER = {"kind": "push", "worker": 3, "shares": [0.25, 0.75], "nested": {"map": {"text": "\u00e4"}}, "raw": b"\xff"}
PREFIX = Prefix(header_bytes=200, payload_bytes=10**6, files=2)
ROUNDS = 30_000


def refused(decode, *args):
    try:
        decode(*args)
    except ConnectionLostError:
        return True
    return False


def test_a_prefix_and_a_header_come_back_as_they_were():
    assert Prefix.decode(PREFIX.encode(), DEFAULT_LIMITS) == PREFIX
    assert decode_header(encode_header(HEADER)) == HEADER


@pytest.mark.parametrize(
    ("prefix", "what"),
    [
        (struct.pack("!4sHHIQ", b"HTTP", VERSION, 0, 10, 0), "b'HTTP' where a message of evenstep must begin"),
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


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\xc0",
        msgpack.packb([1]),
        msgpack.packb({1: 2}),
        msgpack.packb({b"raw": 2}),
        msgpack.packb({"a": {3: 4}}),
        msgpack.packb({"a": 1}) + b"\0",
        msgpack.packb({"a": 1})[:-1],
        msgpack.packb({"a": msgpack.ExtType(5, b"x")}),
        msgpack.packb({"a": msgpack.ExtType(5, b"")}),
        msgpack.packb({"a": msgpack.Timestamp(1, 2)}),
        b"\x81\xa1a\xa1\xff",
        b"\x81\x90\xc0",
        b"\x81" * 60_000,
        b"\x81\xa1a" + b"\x91" * 60_000,
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
        b"\x81\xa1a\xdf\xff\xff\xff\xff",
        b"\x81\xa1a\xdb\xff\xff\xff\xff",
        b"\x81\xa1a\xc6\xff\xff\xff\xff",
    ],
)
def test_a_header_that_is_no_map_of_plain_values_is_refused(header):
    with pytest.raises(ConnectionLostError, match="the peer sent a header that is not"):
        decode_header(header)


def test_a_hundred_thousand_broken_frames_are_refused_or_read_and_leave_no_memory_behind():
    draw = random.Random(0)
    encoded, prefix = encode_header(HEADER), PREFIX.encode()
    process = psutil.Process()
    before = process.memory_info().rss
    outcomes = [0, 0, 0, 0]
    for _ in range(ROUNDS):
        broken = bytearray(encoded)
        for _ in range(draw.randint(1, 3)):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        outcomes[0] += refused(decode_header, bytes(broken))
        outcomes[1] += refused(decode_header, encoded[: draw.randrange(len(encoded))])
        outcomes[2] += refused(decode_header, draw.randbytes(draw.randrange(64)))
        damaged = bytearray(prefix)
        damaged[draw.randrange(8)] ^= draw.randint(1, 255)
        outcomes[3] += refused(Prefix.decode, damaged, DEFAULT_LIMITS)
    gc.collect()
    assert outcomes[1] == ROUNDS, "a truncated header was taken"
    assert outcomes[0] > 0.3 * ROUNDS
    assert outcomes[2] > 0.9 * ROUNDS
    assert outcomes[3] > 0.8 * ROUNDS, "only the number of files, up to its limit, can change without being seen"
    assert process.memory_info().rss - before < 8_000_000


def test_lists_that_announce_many_entries_inside_each_other_reserve_a_bounded_amount():
    header = b"\x81\xa1a" + b"\xdc\x0f\xff" * 20_000
    tracemalloc.start()
    try:
        with pytest.raises(ConnectionLostError):
            decode_header(header)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40_000_000


@pytest.mark.parametrize("header", [{"a": {1, 2}}, {"a": 2**64}, {"a": lambda: None}, {"a": "x" * 2**16}])
def test_a_header_that_cannot_be_sent_is_refused_by_the_sender(header):
    with pytest.raises(ValueError, match=r"use plain values|send what is large as payload"):
        encode_header(header)


def test_a_header_that_contains_itself_is_refused_by_the_sender():
    header = {}
    header["self"] = header
    with pytest.raises(ValueError, match="use plain values"):
        encode_header(header)


def test_the_prefix_has_a_fixed_size():
    assert len(PREFIX.encode()) == PREFIX_BYTES == 20
