"""Headers from a hostile peer are refused, however many, and make nothing of the sizes that they announce."""

import gc
import random
import tracemalloc

import msgspec
import psutil
import pytest

from evenstep.core.activity import Doing
from evenstep.core.errors import ProtocolError
from evenstep.core.values import Reports
from evenstep.protocol import encoding, group_messages, messages, shard_messages
from evenstep.protocol.encoding import decode, encode
from evenstep.protocol.messages import ANSWERED, ASKED, Begin, Grant, NumberedRequest, Ping, PushGradients, Start
from evenstep.transport.base import ConnectionLostError

packed = msgspec.msgpack.encode
ROW = (0,) * Reports.columns()
PUSH = NumberedRequest(
    sequence=1,
    has=-1,
    body=PushGradients(
        claim=0, weights=0, samples=1, units=1, row=ROW, norm=1.0, options=({"lr": 0.5, "betas": (0.9, 0.999)},)
    ),
)
ROUNDS = 30_000


@pytest.mark.parametrize(
    "message",
    [
        PUSH,
        NumberedRequest(sequence=2**62, has=7, body=Begin(number=0, epoch=0, ahead=1)),
        NumberedRequest(sequence=1, has=7, body=Begin(number=0, epoch=0, ahead=0, mean=2**31)),
        Ping(doing=Doing.WAITING, iteration=-1, seconds=0.5, echo=True),
        Start(rank=0, incarnation=-1, has=-1, timeout=60.0),
    ],
)
def test_a_message_comes_back_as_it_was(message):
    assert decode(ASKED, encode(message)) == message


def test_an_answer_comes_back_as_it_was():
    work = Grant(claims=((3, ((0, 2), (7, 9))),), over=False, lead=1, sizes=(2, 4))
    answer = messages.NumberedReply(sequence=1, weights=True, version=5, body=work)
    assert decode(ANSWERED, encode(answer)) == answer


def plain(message):
    """Its header as plain values, to be spoilt."""
    return msgspec.msgpack.decode(encode(message))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("claim", None),
        ("claim", "1"),
        ("claim", b"\0"),
        ("claim", 0.5),
        ("claim", 1.0),
        ("claim", True),
        ("claim", -1),
        ("claim", 2**62 + 1),
        ("claim", 2**64 - 1),
        ("samples", 2**31 + 1),
        ("norm", float("nan")),
        ("norm", float("inf")),
        ("norm", True),
        ("norm", "1"),
        ("row", [0] * (Reports.columns() - 1)),
        ("row", [0.0] * Reports.columns()),
        ("row", [2**64 - 1] * Reports.columns()),
        ("options", []),
        ("options", [{"lr": float("nan")}]),
        ("options", [{"lr": "0.1"}]),
        ("options", [{"lr": None}]),
        ("options", [{"lr": [0.1] * 9}]),
        ("options", [{"lr": [[0.1]]}]),
        ("options", [{"lr": {}}]),
        ("options", [{f"option {number}": 0.0 for number in range(33)}]),
        ("options", {"lr": 0.1}),
        ("unknown", 1),
        ("op", "Nonsense"),
        ("op", "NumberedReply"),
        ("op", 7),
    ],
)
def test_a_field_that_makes_no_sense_is_refused_in_one_sentence(name, value):
    spoilt = plain(PUSH)
    spoilt["body"][name] = value
    with pytest.raises(ProtocolError, match=r"^invalid message \([^\n]*\): install the same"):
        decode(ASKED, packed(spoilt))


@pytest.mark.parametrize("name", ["op", "claim", "weights", "samples", "units", "row", "norm"])
def test_a_field_that_is_missing_is_refused(name):
    spoilt = plain(PUSH)
    del spoilt["body"][name]
    with pytest.raises(ProtocolError, match=name):
        decode(ASKED, packed(spoilt))


@pytest.mark.parametrize("sequence", [0, -1, True, 1.0, "1", None, 2**64 - 1])
def test_a_request_without_a_number_is_refused_and_has_none(sequence):
    spoilt = packed({**plain(PUSH), "sequence": sequence})
    with pytest.raises(ProtocolError):
        decode(ASKED, spoilt)
    assert encoding.sequence_of(spoilt) == 0


def test_a_refused_request_keeps_its_number():
    assert encoding.sequence_of(packed({**plain(PUSH), "sequence": 5, "has": "x", "more": 1})) == 5


REFUSED = (ConnectionLostError, ProtocolError)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\xc0",
        packed([1]),
        packed({1: 2}),
        packed({b"raw": 2}),
        packed({"a": {3: 4}}),
        encode(PUSH) + b"\0",
        encode(PUSH)[:-1],
        packed({"op": msgspec.msgpack.Ext(5, b"x")}),
        packed({"op": msgspec.msgpack.Ext(-1, b"12345678")}),
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
def test_a_header_that_is_no_message_is_refused(header):
    for decoder in (ASKED, ANSWERED, group_messages.FROM_GROUP, group_messages.TO_GROUP, shard_messages.COMMAND):
        with pytest.raises(REFUSED):
            decode(decoder, header)
    assert encoding.sequence_of(header) in (0, 1)


def refused(header):
    try:
        decode(ASKED, header)
    except REFUSED:
        return True
    return False


def test_tens_of_thousands_of_broken_headers_are_refused_or_read_and_leave_no_memory_behind():
    draw = random.Random(0)
    encoded = encode(PUSH)
    process = psutil.Process()
    before = process.memory_info().rss
    outcomes = [0, 0, 0]
    for _ in range(ROUNDS):
        broken = bytearray(encoded)
        for _ in range(draw.randint(1, 3)):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        outcomes[0] += refused(bytes(broken))
        outcomes[1] += refused(encoded[: draw.randrange(len(encoded))])
        outcomes[2] += refused(draw.randbytes(draw.randrange(64)))
    gc.collect()
    assert outcomes[0] > 0.3 * ROUNDS
    assert outcomes[1] == ROUNDS, "a truncated header was taken"
    assert outcomes[2] > 0.9 * ROUNDS
    assert process.memory_info().rss - before < 8_000_000


@pytest.mark.parametrize("opened", [b"\x81\xa1a", b"\x82\xa2op\xa8Together\xa5lines", b"\x82\xa2op\xa4Work\xa6claims"])
def test_lists_that_announce_many_entries_inside_each_other_reserve_a_bounded_amount(opened):
    tracemalloc.start()
    try:
        for decoder in (ASKED, ANSWERED, group_messages.FROM_GROUP):
            with pytest.raises(REFUSED):
                decode(decoder, opened + b"\xdc\x0f\xff" * 20_000)
            with pytest.raises(REFUSED):
                decode(decoder, opened + b"\xdd\x7f\xff\xff\xff" * 20_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40_000_000
