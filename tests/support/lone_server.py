"""A server of one shard and one worker, for which a test speaks."""

import threading

import numpy as np
import torch

from evenstep.core.values import UNLIMITED, Problem
from evenstep.launch.server_settings import ServerSettings
from evenstep.protocol.encoding import decode, encode
from evenstep.protocol.messages import ANSWERED, Begin, Initialise, NumberedRequest, PushGradients, SendWeights, Start
from evenstep.protocol.run_spec import RunSpec
from evenstep.schemes import parse_scheme
from evenstep.server.primary import Primary
from evenstep.server.rendezvous import Rendezvous
from evenstep.server.requests import Service
from evenstep.server.session import ServerSession
from evenstep.server.shard_state import ShardState
from evenstep.torch.engines.describe import describe, layout_of, options_of
from support.in_memory import connected_pair

SECONDS = 30.0
BEGIN = Begin(number=0, epoch=0, ahead=0)


class Kept(list):
    """A recorder whose events stay in memory."""

    record = list.append

    def close(self):
        pass


class Line:
    """A connection within the process that says whether its ends are on one host."""

    def __init__(self, connection, *, local):
        self.connection, self.local = connection, local

    def __getattr__(self, name):
        return getattr(self.connection, name)


class LoneServer:
    """Has one weight, which begins at 0 and which each push lowers by 1.

    `local`: the worker is on the server's host, and shares memory with it.
    `unlocked` counts how often its head was told something by a thread that did not hold the lock.
    """

    def __init__(self, folder, *, local=True):
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        layout, spec = layout_of(model.named_parameters(), [optimizer]), describe(optimizer)
        self.nbytes, self.options = layout.shards(1)[0].nbytes, options_of(spec, optimizer)
        ones = np.ones(1, dtype=np.int64)
        described = RunSpec(
            scheme=parse_scheme("asp"),
            problem=Problem(global_batch_size=2, minimum=ones, maximum=ones * UNLIMITED),
            length=8, drop_last=False, layout=layout, optimizers=(spec,),
        ).encode()  # fmt: skip
        self.folder, self.now, self.events, self.said = folder, 0.0, Kept(), []
        self.lock, self.unlocked = threading.RLock(), 0
        self.shard_state = ShardState(ServerSettings(count=1, workers=1, snapshots=folder, heartbeat_seconds=1e9))
        self.snapshots = self.shard_state.snapshots
        self.primary = Primary(
            shard_state=self.shard_state, followers=[], recorder=self.events, first_incarnation=0,
            clock=self.clock, say=self.said.append, report=lambda event: None,
        )  # fmt: skip
        self.local, self.described = local, described
        self.incarnation = self.connect().incarnation
        self.unlocked = 0

    def connect(self, incarnation=-1):
        """Connect, again if there was a connection, and take this place; returns the answer."""
        self.end, other = connected_pair()
        service = Service(
            shard_state=self.shard_state,
            primary=self.primary,
            rendezvous=Rendezvous(1),
            lock=self.lock,
        )  # fmt: skip
        self.session = ServerSession(Line(other, local=self.local), service)
        start = Start(rank=0, incarnation=incarnation, has=-1, timeout=60.0)
        return self.ask(start, memoryview(self.described))

    def clock(self):
        """The primary asks for the time whatever it is told."""
        self.unlocked += not self.lock._is_owned()
        return self.now

    def say(self, asked, *payload):
        """Send a message, or a header as it is."""
        self.end.send(asked if isinstance(asked, bytes) else encode(asked), *payload)

    def hear(self):
        message = self.end.receive(SECONDS)
        if message.payload_bytes:
            self.end.receive_payload(memoryview(bytearray(message.payload_bytes)))
        return decode(ANSWERED, message.header)

    def ask(self, asked, *payload):
        self.say(asked, *payload)
        assert self.session.serve_one()
        return self.hear()

    def request(self, sequence, body, has=-1):
        return self.ask(NumberedRequest(sequence=sequence, has=has, body=body))

    def fill(self, value):
        """Put the first weight, or a gradient, into the worker's place."""
        message = torch.zeros(self.nbytes, dtype=torch.uint8)
        message[:4].view(torch.float32).fill_(value)
        self.shard_state.slots[0].gradients.copy_(message)

    def begin(self):
        assert isinstance(self.request(1, BEGIN).body, SendWeights)
        self.fill(0.0)
        self.request(2, Initialise())
        self.claim = self.request(3, BEGIN).body.claims[0][0]

    def push(self):
        version = self.shard_state.version
        push = PushGradients(
            claim=self.claim, weights=version, samples=2, units=2, row=(2, 1000, 0, UNLIMITED), norm=1.0,
            options=self.options,
        )  # fmt: skip
        self.fill(1.0)
        answer = self.request(4 + version, push, has=version)
        claims = answer.body.claims
        self.claim = claims[0][0] if claims else None
        return answer

    def look(self, seconds):
        self.now += seconds
        with self.lock:
            self.primary.look()

    def told(self):
        return [(event.kind, event.version) for event in self.events if event.kind.startswith("snapshot")]

    def saved(self, version):
        return weight_in(self.snapshots.read(version, 0))


def weight_in(state):
    return float(state["shard"]["weights"][:4].view(torch.float32))
