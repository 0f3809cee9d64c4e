"""Snapshots are written while the run goes on, and what becomes of them is told."""

import io
import os

import pytest
import torch
from support.lone_server import LoneServer, weight_in


@pytest.fixture
def server(tmp_path):
    return LoneServer(tmp_path / "snapshots")


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
    assert [server.push().version, server.push().version] == [2, 3]
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
    while not server.push().body.over:
        assert server.shard_state.version < 10
    assert server.snapshots.latest() == server.shard_state.version
    assert server.told()[-1] == ("snapshot", server.shard_state.version)
    assert server.saved(server.shard_state.version) == -float(server.shard_state.version)


def test_the_last_snapshot_is_on_the_disk_when_the_server_ends(server):
    server.begin()
    server.push()
    server.primary.finish()
    assert (server.snapshots.latest(), server.told()[-1]) == (1, ("snapshot", 1))
