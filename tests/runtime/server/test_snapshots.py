"""Snapshots are written while the run goes on, and what becomes of them is told."""

import io
import os
import threading

import numpy as np
import pytest
import torch

from evenstep.core.values import UNLIMITED, Problem
from evenstep.runtime.server.head import Head
from evenstep.runtime.server.layout import Layout
from evenstep.runtime.server.meeting import Meeting
from evenstep.runtime.server.replica import Replica
from evenstep.runtime.server.run_spec import RunSpec
from evenstep.runtime.server.session import Session
from evenstep.runtime.server.snapshots import Snapshots
from evenstep.runtime.server.updates import describe, options_to_record
from evenstep.schemes import parse_scheme
from evenstep.transport.memory import connected_pair

SECONDS = 30.0


class Kept(list):
    """A recorder whose events stay in memory."""

    record = list.append

    def close(self):
        pass


class Server:
    """One shard and one worker, for which the test speaks; each push lowers the weight by 1."""

    def __init__(self, folder):
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        layout, spec = Layout.of(model.named_parameters(), [optimizer]), describe(optimizer)
        self.nbytes, self.options = layout.shards(1)[0].nbytes, options_to_record(spec.options(optimizer))
        ones = np.ones(1, dtype=np.int64)
        described = RunSpec(
            scheme=parse_scheme("asp"),
            problem=Problem(global_batch_size=2, minimum=ones, maximum=ones * UNLIMITED),
            length=8, drop_last=False, layout=layout, optimizers=(spec,),
        ).encode()  # fmt: skip
        self.folder, self.snapshots, self.now, self.events, self.said = folder, Snapshots(folder, 1), 0.0, Kept(), []
        self.replica = Replica(index=0, count=1, snapshots=self.snapshots)
        self.head = Head(
            replica=self.replica, workers=1, followers=[], snapshots=self.snapshots, resume=False,
            snapshot_seconds=60.0, heartbeat_seconds=1e9, recorder=self.events, first_incarnation=0,
            clock=lambda: self.now, say=self.said.append,
        )  # fmt: skip
        self.end, other = connected_pair()
        self.session = Session(
            other, replica=self.replica, head=self.head, meeting=Meeting(1), lock=threading.RLock(), workers=1,
            heartbeat_seconds=1.0,
        )  # fmt: skip
        self.ask({"op": "start", "rank": 0, "incarnation": -1, "seq": 0, "has": -1}, memoryview(described))

    def ask(self, header, *payload):
        self.end.send(header, *payload)
        assert self.session.serve_one()
        message = self.end.receive(SECONDS)
        if message.payload_bytes:
            self.end.receive_payload(memoryview(bytearray(message.payload_bytes)))
        return message.header

    def fill(self, value):
        """Put the first weight, or a gradient, into the worker's place."""
        message = torch.zeros(self.nbytes, dtype=torch.uint8)
        message[:4].view(torch.float32).fill_(value)
        self.replica.seats[0].gradients.copy_(message)

    def begin(self):
        begin = {"op": "begin", "number": 0, "epoch": 0, "ahead": 0, "has": -1}
        assert self.ask({**begin, "seq": 1})["initialise"]
        self.fill(0.0)
        self.ask({"op": "initialise", "seq": 2})
        self.claim = self.ask({**begin, "seq": 3})["claims"][0][0]

    def push(self):
        version = self.replica.version
        header = {
            "op": "push", "seq": 4 + version, "claim": self.claim, "weights": version, "samples": 2, "units": 2,
            "row": [2, 1000, 1000, 0, 0, 0, UNLIMITED], "norm": 1.0, "options": self.options, "has": version,
        }  # fmt: skip
        self.fill(1.0)
        answer = self.ask(header)
        self.claim = answer["claims"][0][0] if answer["claims"] else None
        return answer

    def look(self, seconds):
        self.now += seconds
        self.head.look()

    def told(self):
        return [(event["event"], event["version"]) for event in self.events if event["event"].startswith("snapshot")]

    def saved(self, version):
        return weight_in(self.snapshots.read(version, 0))


def weight_in(state):
    return float(state["shard"]["weights"][:4].view(torch.float32))


@pytest.fixture
def server(tmp_path):
    return Server(tmp_path / "snapshots")


@pytest.fixture
def slow_disk(server):
    """What is written of version 1 goes into a pipe: it takes until somebody reads it, and cannot be put on a disk."""
    folder = server.folder / "version-000000000001"
    folder.mkdir(parents=True)
    os.mkfifo(folder / ".shard-0.partial")
    return folder / ".shard-0.partial"


def test_training_goes_on_while_a_snapshot_of_one_version_is_being_written(server, slow_disk):
    server.begin()
    server.push()
    server.look(seconds=61.0)
    assert [server.push()["version"], server.push()["version"]] == [2, 3]
    server.look(seconds=61.0)  # No second copy is made meanwhile.
    assert (server.snapshots.busy, server.told()) == (True, [("snapshot", 0)])
    written = slow_disk.read_bytes()
    assert weight_in(torch.load(io.BytesIO(written), weights_only=True)) == -1.0
    slow_disk.open("wb").close()  # For the thread that is to see to it that all is on the disk.
    server.snapshots.wait()
    server.look(seconds=0.0)
    server.snapshots.wait()
    server.look(seconds=0.0)
    assert server.told() == [("snapshot", 0), ("snapshot_failed", 1), ("snapshot", 3)]
    assert server.saved(3) == -3.0


def test_an_error_of_the_disk_is_told_once_until_a_snapshot_is_written_again(server):
    server.folder.write_text("a file where the snapshots are to go")
    server.begin()
    for _ in range(2):
        server.push()
        server.look(seconds=61.0)
        server.snapshots.wait()
        server.look(seconds=0.0)
    assert server.told() == [("snapshot_failed", 0)]
    (said,) = server.said
    assert "no snapshot can be written" in said
    assert "Not a directory" in said
    server.folder.unlink()
    server.push()
    server.look(seconds=61.0)
    server.snapshots.wait()
    server.look(seconds=0.0)
    assert server.told() == [("snapshot_failed", 0), ("snapshot", 3)]


def test_when_a_worker_hears_that_a_pass_is_over_its_snapshot_is_on_the_disk(server):
    server.begin()
    while not server.push()["over"]:
        assert server.replica.version < 10
    assert server.snapshots.latest() == server.replica.version
    assert server.told()[-1] == ("snapshot", server.replica.version)
    assert server.saved(server.replica.version) == -float(server.replica.version)


def test_the_last_snapshot_is_on_the_disk_when_the_server_ends(server):
    server.begin()
    server.push()
    server.head.finish()
    assert (server.snapshots.latest(), server.told()[-1]) == (1, ("snapshot", 1))
