"""Servers and workers in threads over lines within the process, on which faults befall messages; in a time that jumps.

The links, sessions, head and replicas are the product's; a worker is a loop over its link that computes gradients of a
small model from the weights that it was sent.
"""

import copy
import threading
from collections import Counter

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from evenstep.core.activity import Doing
from evenstep.core.values import UNLIMITED, Problem, Reports
from evenstep.launch.server_settings import ServerSettings
from evenstep.protocol.encoding import encode
from evenstep.protocol.messages import Begin, Follow, Initialise, Ping, PushGradients, Rest, SendWeights
from evenstep.protocol.run_spec import RunSpec
from evenstep.schemes import parse_scheme
from evenstep.server.primary import Primary
from evenstep.server.rendezvous import Rendezvous
from evenstep.server.requests import Service
from evenstep.server.serving import serve_all
from evenstep.server.session import ServerSession
from evenstep.server.shard_state import ShardState
from evenstep.telemetry.reading import event_of
from evenstep.telemetry.recorder import line_of
from evenstep.tensors.messages import memory_of, parameter_views
from evenstep.tensors.narrow import NarrowMessages
from evenstep.torch.engines.describe import describe, layout_of, options_of
from evenstep.transport.base import SilentError
from evenstep.worker.servers.link import ServerLink
from support.clocks import FakeClock
from support.faulty import Faulty, never_in_a_row, seeded
from support.guard import GUARD_SECONDS
from support.in_memory import connected_pair

WORKERS = 3
SAMPLES = 77
PROBLEM = Problem(
    global_batch_size=15,
    minimum=np.ones(WORKERS, dtype=np.int64),
    maximum=np.full(WORKERS, UNLIMITED, dtype=np.int64),
)
HEARTBEAT_SECONDS = 0.2  # of the time that jumps; the thread of a worker's pulse looks four times in it whether to end


def optimizer_of(model):
    """Which all train with."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Troubled:
    """A connection on which faults befall the requests of a run and their answers, but not how it begins, or pulses.

    A worker's pulse is sent in the time that jumps, and the one of its thread, in real time, is not.
    """

    def __init__(self, connection, plan, *, local, pulses):
        self.local = local
        self.line = connection
        self.faulty = Faulty(connection, plan)
        self.pulses = pulses

    def send(self, header, *payload, files=(), wait=True):
        fields = msgspec.msgpack.decode(header)
        if fields["op"] == "Ping":
            return
        line = self.faulty if fields.get("sequence") and fields["op"] != "Pending" else self.line
        line.send(header, *payload, files=files, wait=wait)

    def receive(self, timeout=None):
        try:
            return self.line.receive(timeout)
        except SilentError:
            if self.pulses:
                self.line.send(encode(Ping(doing=Doing.WAITING, iteration=0, seconds=0.0, echo=True)))
            raise

    def receive_payload(self, *buffers):
        self.line.receive_payload(*buffers)

    def close(self):
        self.faulty.close()


class Events:
    """A recorder that keeps what it is given."""

    def __init__(self):
        self.kept = []

    def record(self, event):
        self.kept.append(event_of(line_of(event)))

    def close(self):
        pass


class Trial:
    """One run of `WORKERS` workers over two epochs.

    Args:
        folder: For snapshots.
        scheme: As a string.
        shards: Servers.
        rates: The share of messages that each fault befalls.
        local: Gradients and weights lie in shared memory; else they travel with the messages.
        costs: What each sample costs, in whole numbers; None if all cost alike.
    """

    def __init__(self, folder, scheme, shards, rates, *, seed=0, local=True, costs=None):
        self.costs = costs
        self.scheme = parse_scheme(scheme)
        self.rates = rates
        self.seed = seed
        self.local = local
        self.clock = FakeClock(threads=WORKERS * (1 + shards) + shards - 1)
        self.lines = []
        self.troubled = []
        self.events = Events()
        self.said = []
        self.reported = []
        self.threads = []
        self.pulses = []
        self.committed = []
        self.failures = []
        self.weights = {}
        self.workers = {}
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
        self.models = [copy.deepcopy(model) for _ in range(WORKERS)]
        settings = ServerSettings(
            count=shards, workers=WORKERS, snapshots=folder / "snapshots", snapshot_seconds=1e9,
            heartbeat_seconds=HEARTBEAT_SECONDS,
        )  # fmt: skip
        self.shard_states = [ShardState(replace(settings, index=index)) for index in range(shards)]
        self.locks = [threading.Lock() for _ in range(shards)]
        self.rendezvous = Rendezvous(WORKERS)
        followers = [self._follow(index) for index in range(1, shards)]
        self.primary = Primary(
            shard_state=self.shard_states[0],
            followers=followers,
            recorder=self.events,
            say=self.said.append,
            report=self.reported.append,
            first_incarnation=0,
            clock=self.clock.now,
        )

    def run(self):
        """Until all workers have ended; the last weights of each, by rank."""
        workers = [threading.Thread(target=self._work, args=(rank,), daemon=True) for rank in range(WORKERS)]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join(GUARD_SECONDS)
            assert not thread.is_alive(), "the run did not end"
        # Shard 0 tells the others that the workers are gone, so its lines to them are closed last: they are the first.
        for line, thread in zip(reversed(self.lines), reversed(self.threads), strict=True):
            line.close()
            thread.join(GUARD_SECONDS)
        for thread in self.pulses:
            thread.join(GUARD_SECONDS)
        if self.failures:
            raise self.failures[0]
        return self.weights

    @property
    def fired(self):
        """How often each fault befell a message, over all lines."""
        return sum((line.faulty.fired for line in self.troubled), Counter())

    # The servers.

    def _serve(self, shard, connection):
        service = Service(
            shard_state=self.shard_states[shard],
            primary=self.primary if not shard else None,
            rendezvous=self.rendezvous,
            lock=self.locks[shard],
        )
        session = ServerSession(connection, service)

        def serve():
            serve_all(session)
            self.clock.leave()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        self.threads.append(thread)

    def _follow(self, shard):
        one, other = connected_pair(clock=self.clock)
        self.primary = None
        self._serve(shard, other)
        one.send(encode(Follow()))
        self.lines.append(one)
        return one

    # The workers.

    def _connect(self, rank, shard):
        one, other = connected_pair(clock=self.clock)
        seeds = [self.seed * 1000 + rank * 100 + shard * 10 + end for end in (0, 1)]
        # Else chance would now and then silence a server for longer than its heartbeat, and workers would join again.
        plans = [never_in_a_row(seeded(seed, self.rates)) for seed in seeds]
        ours = Troubled(one, plans[0], local=self.local, pulses=True)
        theirs = Troubled(other, plans[1], local=self.local, pulses=False)
        with self.clock.changed:
            self.troubled += [ours, theirs]
            self.lines.append(ours)
            self._serve(shard, theirs)
        return ours

    def _work(self, rank):
        try:
            self._train(rank)
        except Exception as error:
            self.failures.append(error)
        finally:
            self.clock.leave()

    def _train(self, rank):
        model = self.models[rank]
        optimizer = optimizer_of(model)
        spec = describe(optimizer)
        layout = layout_of(model.named_parameters(), [optimizer])
        layouts = layout.shards(len(self.shard_states))
        described = RunSpec(
            scheme=self.scheme, problem=PROBLEM, length=SAMPLES, drop_last=False, layout=layout, optimizers=(spec,)
        )
        link = ServerLink(
            rank,
            lambda shard: self._connect(rank, shard),
            len(layouts),
            timeout_seconds=1e6,
            clock=self.clock.now,
            wait=lambda seconds: None,
        )
        link.start(described.encode(), [each.nbytes for each in layouts])
        worker = self.workers[rank] = Worker(link, layouts, model, options_of(spec, optimizer), self.costs)
        if (wire := self.scheme.served.wire) != "float32":
            worker.on_wire(wire, layouts, [state.slots[rank] for state in self.shard_states])
        for number in range(2):
            self.committed.append((number, worker.epoch(number)))
        self.weights[rank] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
        link._closed.set()
        self.pulses.append(link._pulse)


class Worker:
    """What a worker does with its link; `pushed` has the version, the positions and the weights of each push."""

    def __init__(self, link, layouts, model, options, costs=None):
        self.pushed = []
        self.narrow = self.slots = ()
        self.mean = None if costs is None else sum(costs) // len(costs)
        self.costs = [] if costs is None else [np.array(costs, dtype="<u4").view(np.uint8).data]
        self.link = link
        self.model = model
        self.options = options
        named = dict(model.named_parameters())
        self.shards = [
            (
                [named[each.name] for each in layout.parameters],
                parameter_views(layout, shard.gradients.data),
                parameter_views(layout, shard.weights.data),
            )
            for layout, shard in zip(layouts, link.shards, strict=True)
        ]
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
        self.targets = self.inputs.sum(1, keepdim=True).sin()

    def on_wire(self, wire, layouts, slots):
        """Use a narrow wire to these slots."""
        self.narrow, self.slots = [NarrowMessages(layout, wire) for layout in layouts], slots
        for narrow, shard in zip(self.narrow, self.link.shards, strict=True):
            shard.narrow_bytes = narrow.nbytes

    def epoch(self, number):
        """The positions that were computed on."""
        begin = Begin(number=number, epoch=number, ahead=0, mean=self.mean)
        answer = self.link.ask(begin, *self.costs)
        if isinstance(answer.body, SendWeights):
            self.put(lambda parameter: parameter.detach())
            self.link.ask(Initialise(), gradients=True)
            answer = self.link.ask(begin, *self.costs)
        positions = []
        while True:
            self.take(answer)
            if answer.body.over:
                return positions
            if not answer.body.claims:
                answer = self.link.ask(Rest())
                continue
            ((claim, ranges),) = answer.body.claims
            part = [position for start, stop in ranges for position in range(start, stop)]
            positions += part
            answer = self.push(claim, part, answer.version)

    def push(self, claim, part, version):
        self.pushed.append((version, part, [parameter.detach().clone() for parameter in self.model.parameters()]))
        self.backward(part)
        self.put(lambda parameter: parameter.grad)
        for narrow, shard in zip(self.narrow, self.link.shards, strict=False):
            shard.payload = [memory_of(narrow.round(torch.from_numpy(shard.gradients), None)[0])]
        row = (len(part), 1000, 0, UNLIMITED)
        assert len(row) == Reports.columns()
        push = PushGradients(
            claim=claim,
            weights=version,
            samples=len(part),
            units=len(part),
            row=row,
            norm=1.0,
            options=self.options,
        )
        return self.link.ask(push, gradients=True)

    def backward(self, part):
        self.model.zero_grad()
        torch.nn.functional.mse_loss(self.model(self.inputs[part]), self.targets[part]).backward()

    def put(self, what):
        for parameters, gradients, _ in self.shards:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                gradient.copy_(what(parameter))

    def take(self, answer):
        for narrow, shard, slot in zip(self.narrow, self.link.shards, self.slots, strict=False):
            for difference in shard.differences:
                narrow.add(torch.frombuffer(difference, dtype=torch.uint8), torch.from_numpy(shard.weights))
            shard.differences.clear()
            assert not answer.weights or torch.from_numpy(shard.weights).equal(slot.weights)
        if answer.weights:
            for parameters, _, weights in self.shards:
                for parameter, weight in zip(parameters, weights, strict=True):
                    parameter.data.copy_(weight)
