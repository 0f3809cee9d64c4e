"""A worker that has been let in and has joined, and from then on sends what no worker sends.

Every message is bad in one way, and small: what a server must not do is to fail, to grow, or to hold up the others.
"""

import os
import random
from contextlib import suppress

import msgspec
import psutil

from evenstep.core.values import Reports
from evenstep.transport.base import ConnectionLostError
from evenstep.transport.codec import DEFAULT_LIMITS, PREFIX_BYTES, Prefix
from support import served_training
from support.guard import GUARD_SECONDS
from support.training import step

ROW = [0] * Reports.columns()
GOOD = {
    "Meet": {"rank": 1, "round": 0},
    "Start": {"rank": 1, "incarnation": -1, "has": -1},
    "Initialise": {},
    "Begin": {"number": 0, "epoch": 0, "ahead": 0},
    "PushGradients": {"claim": 0, "weights": 0, "samples": 1, "units": 1, "row": ROW, "norm": 1.0, "options": [{}]},
    "Stage": {},
    "More": {"ahead": 1},
    "Rest": {},
    "Again": {},
    "Stop": {},
    "LoadStates": {},
}
"""The fields of each request beside its number; with them a request could be right at some moment, all but `Start`."""
NUMBERED = ("Stage", "Again")
BODIES = ("Initialise", "Begin", "PushGradients", "More", "Rest", "Stop")
NOT_NUMBERS = (None, "1", b"\0", 0.5, float("nan"), -2, 2**62 + 1, 2**64 - 1, True, [], [1], {}, {"a": [1, {"b": 2}]})
OPERATIONS = (None, 7, "", "__init__", "Follow", "ServeGroup", "ShardCommit", "x" * 1000, ["PushGradients"])
ERRORS = ("ConfigError", "DisagreementError", "ProtocolError")
"""What servers refuse with on purpose."""


def good(operation, sequence, **more):
    fields = {"op": operation, **GOOD[operation], **more}
    if operation in BODIES:
        return {"op": "NumberedRequest", "sequence": sequence, "has": -1, "body": fields}
    return {**fields, "sequence": sequence} if operation in NUMBERED else fields


def train_beside(run, number, abused, *, epochs_after=2):
    """An ordinary loop that goes on until the abuse is over, and a little longer: each pass's samples and loss.

    `number` is where the other one finds the number of the pass under way.
    """
    model, optimizer, loader, _ = served_training.prepared(run)
    passes, after = [], 0
    while after < epochs_after:
        after += abused.is_set()
        number.value = len(passes)
        positions, losses = [], []
        for inputs, targets in loader:
            losses.append(float((model(inputs).detach() - targets).square().mean()))
            step(model, optimizer, inputs, targets)
            positions += served_training.seen(loader)
        passes.append((sorted(positions), sum(losses) / len(losses)))
    return passes


def abuse(run, servers, messages, seed, number, abused):
    """Sends so many bad messages; how each was answered, and by how much the servers grew in the meantime."""
    try:
        _, _, loader, _ = served_training.prepared(run)
        link = loader.engine._link
        peer = Peer(link, random.Random(seed), number)
        loader.close()
        peer.send_bad(messages // 5)
        peer.begins = True
        before = [resources(pid) for pid in servers]
        peer.send_bad(messages)
        after = [resources(pid) for pid in servers]
        peer.say_goodbye()
    finally:
        abused.set()
    grown = [[b - a for a, b in zip(*each, strict=True)] for each in zip(before, after, strict=True)]
    return {"answers": peer.answers, "grown": grown}


def resources(pid):
    """Bytes of memory, descriptors and threads of a process."""
    process = psutil.Process(pid)
    return process.memory_info().rss, process.num_fds(), process.num_threads()


class Peer:
    """Knows the secret, has a place at a server, and abuses it; a new place where it has lost the old one."""

    def __init__(self, link, draw, number):
        self.answers = {}
        self.begins = False
        """Whether it takes part in passes, so that it holds samples, and others back, until it loses its place."""
        self._number = number
        self._connect = link.shards[0].connect
        self._described = link._described
        self._shards = range(len(link.shards))
        self._draw = draw
        self._sequence = 0
        self._connection = None

    def send_bad(self, messages):
        for _ in range(messages):
            if self._connection is None:
                self._join()
            (kind,) = self._draw.choices((self._field, self._operation, self._frame, self._cut), (16, 2, 1, 1))
            try:
                answer = kind()
            except ConnectionLostError:
                answer = "closed"
            if answer == "closed":
                self.leave()
            self.answers[answer] = self.answers.get(answer, 0) + 1

    def leave(self):
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _join(self):
        """Takes a place as a worker does."""
        self._take_place(self._draw.choice(self._shards))
        if self.begins and self._draw.random() < 0.5:
            number = self._number.value
            self._sequence += 1
            self._send(good("Begin", 1, number=number, epoch=number, ahead=1))

    def say_goodbye(self):
        """As a worker that is done: over a network its place would be kept for it."""
        self.leave()
        self._take_place(0)
        self._send({"op": "Goodbye"})
        self.leave()

    def _take_place(self, shard):
        self._connection = self._connect(shard)
        self._send(good("Start", 0, timeout=60.0), self._described)
        self._await("incarnation")
        self._sequence = 0

    def _send(self, fields, payload=b""):
        self._connection.send(msgspec.msgpack.encode(fields), memoryview(payload))

    def _await(self, field):
        """The next message that has this field."""
        while True:
            message = self._connection.receive(GUARD_SECONDS)
            for file in message.files:
                os.close(file)
            fields = msgspec.msgpack.decode(message.header)
            if field in fields:
                return fields

    def _refused(self):
        return self._await("error")["kind"]

    def _field(self):
        """A request of which one field is missing or has no sense."""
        self._sequence += 1
        fields = good(self._draw.choice([name for name in GOOD if name != "LoadStates"]), self._sequence)
        spoilt = fields
        if len(fields.get("body", {})) > 1 and self._draw.random() < 0.5:
            spoilt = fields["body"] = dict(fields["body"])
        name = self._draw.choice([name for name in spoilt if name != "op"])
        spoilt[name] = self._draw.choice(NOT_NUMBERS)
        if self._draw.random() < 0.2:
            del spoilt[name]
        self._send(fields, self._draw.randbytes(self._draw.choice((0, 0, 1, 100, 10_000))))
        return self._refused()

    def _operation(self):
        """A request for nothing that a server does, or does for a worker."""
        fields = {"op": self._draw.choice(OPERATIONS)}
        if self._draw.random() < 0.2:
            del fields["op"]
        self._send(fields, bytes(self._draw.choice((0, 1000))))
        return self._refused()

    def _frame(self):
        """Bytes that are no message, or announce more than there can be: nothing can come after them."""
        draw = self._draw
        header = msgspec.msgpack.encode(good("PushGradients", 1))
        most, large = DEFAULT_LIMITS.header_bytes, DEFAULT_LIMITS.payload_bytes
        self._raw(
            draw.choice(
                (
                    draw.randbytes(draw.randrange(PREFIX_BYTES, 300)),
                    Prefix(header_bytes=50, payload_bytes=0, files=0).encode() + b"\xc1" + draw.randbytes(49),
                    Prefix(header_bytes=draw.randrange(most + 1, 2**32), payload_bytes=0, files=0).encode(),
                    Prefix(header_bytes=10, payload_bytes=draw.randrange(large + 1, 2**64), files=0).encode(),
                    Prefix(header_bytes=len(header), payload_bytes=0, files=3).encode() + header,
                    self._too_long("Meet", draw.randrange(2**27, large)),
                    self._too_long("Start", draw.randrange(2**27, large)),
                    self._too_long("Initialise", draw.randrange(2**20, large)),
                    self._too_long("LoadStates", draw.randrange(2**30, large)),
                )
            )
        )
        return self._refused()

    def _too_long(self, operation, payload_bytes):
        """A request that announces a payload which is longer than any for it can be, and does not send it."""
        self._sequence += 1
        more = {"timeout": 60.0} if operation == "Start" else {}
        header = msgspec.msgpack.encode(good(operation, self._sequence, **more))
        return Prefix(header_bytes=len(header), payload_bytes=payload_bytes, files=0).encode() + header

    def _cut(self):
        """A request that ends, with the connection, somewhere before its end."""
        self._sequence += 1
        operation = self._draw.choice(list(GOOD))
        header = msgspec.msgpack.encode(good(operation, self._sequence))
        frame = Prefix(header_bytes=len(header), payload_bytes=5000, files=0).encode() + header + bytes(5000)
        self._raw(frame[: self._draw.randrange(1, len(frame))])
        return "closed"

    def _raw(self, content):
        with suppress(BrokenPipeError):
            self._connection._write([memoryview(content)], (), True)
