"""What befalls a worker of a run on servers, by worker and iteration: it dies, stops, or loses its connection.

Functions return plain values; what a worker pushed is written to a file too, since one that is killed returns none.
"""

import json
import os
import signal
from pathlib import Path

import msgspec
import torch

from evenstep.torch.processes import join_servers
from evenstep.transport.codec import Prefix
from support import served_training, training
from support.guard import GUARD_SECONDS
from support.training import step, weights


def rank():
    return int(os.environ["RANK"])


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


class Failing:
    """A connection on which something befalls the message of one kind and number."""

    def __init__(self, connection, shard, plan):
        self.local = connection.local
        self.connection = connection
        self.shard = shard
        self.plan = plan

    def send(self, header, *payload, files=(), wait=True):
        act = self.plan.due(self.shard, header)
        if act is None:
            self.connection.send(header, *payload, files=files)
        else:
            act(self.connection, header, payload)

    def receive(self, timeout=None):
        return self.connection.receive(timeout)

    def receive_payload(self, *buffers):
        self.connection.receive_payload(*buffers)

    def close(self):
        self.connection.close()


class Plan:
    """The message of this number (from 1) that asks a shard for this operation: what happens to it. It happens once."""

    def __init__(self, operation, number, act, shard=0):
        self.operation = operation
        self.number = number
        self.act = act
        self.shard = shard
        self.seen = 0
        self.fired = False

    def due(self, shard, header):
        fields = msgspec.msgpack.decode(header)
        operation = fields.get("body", fields)["op"].lower()
        if (shard, operation) != (self.shard, self.operation) or self.fired:
            return None
        self.seen += 1
        self.fired = self.seen == self.number
        return self.act if self.fired else None

    def befall(self):
        """All connections that this process makes from now on."""
        connect = join_servers.connect
        known = []

        def failing(addresses, **options):
            if addresses not in known:
                known.append(addresses)
            return Failing(connect(addresses, **options), known.index(addresses), self)

        join_servers.connect = failing


def half(connection, header, payload):
    """The first half of a message."""
    body = b"".join(bytes(each) for each in payload)
    frame = Prefix(header_bytes=len(header), payload_bytes=len(body), files=0).encode() + header + body
    connection._wire.write([memoryview(frame)[: len(frame) // 2]], ())


def die_before(connection, header, payload):
    kill()


def die_within(connection, header, payload):
    half(connection, header, payload)
    kill()


def die_after(connection, header, payload):
    connection.send(header, *payload)
    kill()


def cut_before(connection, header, payload):
    connection.close()
    connection.send(header, *payload)


def cut_within(connection, header, payload):
    half(connection, header, payload)
    connection.close()


def cut_after(connection, header, payload):
    connection.send(header, *payload)
    connection.close()


def train(run, folder, victim, faults):
    """An ordinary loop, in which something befalls the victim.

    `faults`: what to do before an iteration's (from 1) backward or step, as {(iteration, "step"): ...}; or a `Plan`.
    """
    if rank() == victim and isinstance(faults, Plan):
        faults.befall()
    points = faults if rank() == victim and isinstance(faults, dict) else {}
    model, optimizer, loader, scheduler = served_training.prepared(run)
    ended, done = [], 0
    with Path(folder, f"pushed-{rank()}").open("a", buffering=1) as pushed:
        for epoch in range(run.epochs):
            for inputs, targets in loader:
                done += 1
                positions = served_training.seen(loader)
                points.get((done, "backward"), nothing)()
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                points.get((done, "step"), nothing)()
                incarnation = loader.engine._link.incarnation
                if loader.synchronises:  # Of the steps of a period, the last.
                    pushed.write(json.dumps([epoch, done, positions, incarnation]) + "\n")
                optimizer.step()
            scheduler.step()
            ended.append(weights(model))
            points.get((epoch, "epoch"), nothing)()
    fired = isinstance(faults, Plan) and faults.fired
    return {"ended": ended, "fired": fired, "incarnation": loader.engine._link.incarnation}


def nothing():
    """No fault."""


def train_to_the_end(run):
    """The rest of a run that goes on from a snapshot: this worker's weights at its end."""
    model, optimizer, loader = training.prepared(run)
    with loader:
        for _ in range(loader.epoch, run.epochs):
            for inputs, targets in loader:
                step(model, optimizer, inputs, targets)
        return weights(model)


def train_each(run, folder, faults):
    """As `train`, with several victims: their faults by rank."""
    return train(run, folder, rank() if rank() in faults else -1, faults.get(rank(), {}))


def train_and_look(run, folder):
    """Version -> the weights that this worker computed on, of each version that it was given."""
    found = {}
    model, optimizer, loader, _ = served_training.prepared(run)
    with Path(folder, f"pushed-{rank()}").open("a", buffering=1) as pushed:
        for epoch in range(run.epochs):
            for inputs, targets in loader:
                found[loader.engine._pass.version] = weights(model)
                pushed.write(json.dumps([epoch, len(found), served_training.seen(loader), 0]) + "\n")
                step(model, optimizer, inputs, targets)
    return found


def pushed(folder, *, without=(), only=None):
    """Epoch -> all positions pushed, over all workers, but for these (worker, iteration).

    `only`: of these epochs, only what was pushed by these incarnations.
    """
    found = {}
    for file in Path(folder).glob("pushed-*"):
        worker = int(file.name.partition("-")[2])
        for line in file.read_text().splitlines():
            epoch, iteration, positions, incarnation = json.loads(line)
            counts = only is None or epoch not in only or incarnation in only[epoch]
            if (worker, iteration) not in without and counts:
                found.setdefault(epoch, []).extend(positions)
    return {epoch: sorted(positions) for epoch, positions in found.items()}


class Kill:
    """Dies at this point, once `others` have said that they are about to be held."""

    def __init__(self, others=None):
        self.others = others

    def __call__(self):
        if self.others is not None:
            self.others.wait(GUARD_SECONDS)
        kill()


def train_held(run, folder, victim, held_at, barrier):
    """The victim dies in its first iteration, when all others are about to push what they are held after."""
    points = {(1, "step"): Kill(barrier)} if rank() == victim else {(held_at, "step"): barrier.wait}
    return train(run, folder, rank(), points)


def train_and_stop(run, folder, victim, iteration, pid, stopped, barrier):
    """The victim stops itself; the others, once they have finished the epoch without it, have it go on, and wait.

    The others wait in the same iteration for the victim, so that the epoch cannot end before it has got there.
    """
    if rank() == victim:

        def stop():
            pid.value = os.getpid()
            stopped.set()
            os.kill(os.getpid(), signal.SIGSTOP)

        return train(run, folder, victim, {(iteration, "step"): stop, (0, "epoch"): barrier.wait})

    def have_it_go_on():
        if rank() == (victim + 1) % 3:
            os.kill(pid.value, signal.SIGCONT)
        barrier.wait(GUARD_SECONDS)

    def wait():
        assert stopped.wait(GUARD_SECONDS)

    return train(run, folder, rank(), {(iteration, "step"): wait, (0, "epoch"): have_it_go_on})


def train_and_save(run):
    """The optimizer's state after all, once it was given to the servers again."""
    model, optimizer, loader, _ = served_training.prepared(run)
    for _ in range(run.epochs):
        for inputs, targets in loader:
            step(model, optimizer, inputs, targets)
    optimizer.load_state_dict(optimizer.state_dict())
    states = optimizer.state_dict()["state"]
    return [float(state["exp_avg_sq"].sum()) for _, state in sorted(states.items())]
