"""Snapshots are written while the run goes on, and what becomes of them is told."""

import io
import os

import pytest
import torch
from support.lone_server import LoneServer, weight_in

from evenstep.core.errors import ConfigError
from evenstep.server.shard.snapshots import Snapshots


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
    assert server.snapshots.latest(print) == server.shard_state.version
    assert server.told()[-1] == ("snapshot", server.shard_state.version)
    assert server.saved(server.shard_state.version) == -float(server.shard_state.version)


def test_the_last_snapshot_is_on_the_disk_when_the_server_ends(server):
    server.begin()
    server.push()
    server.primary.finish()
    assert (server.snapshots.latest(print), server.told()[-1]) == (1, ("snapshot", 1))


@pytest.fixture
def two(tmp_path):
    """The snapshots of versions 1 and 2 of a run on one server."""
    snapshots, failures = Snapshots(tmp_path, 1), []
    for version in (1, 2):
        snapshots.write(version, 0, {"weight": torch.full((1000,), float(version))}, failures.append)
        snapshots.wait()
    assert failures == [None, None]
    return snapshots


def flip(folder, version):
    path = folder / f"version-{version:012}" / "shard-0.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_snapshot_gives_way_to_the_one_before(two, tmp_path):
    said = []
    assert two.latest(said.append) == 2
    flip(tmp_path, 2)
    assert (two.latest(said.append), len(said)) == (1, 1)
    assert "version-000000000002/shard-0.pt is damaged and left out" in said[0]
    flip(tmp_path, 1)
    with pytest.raises(ConfigError, match=r"no snapshot in .* is whole: give another run directory to start over"):
        two.latest(said.append)


def test_snapshots_of_another_number_of_servers_are_named(two, tmp_path):
    with pytest.raises(ConfigError, match=r"are of 1 servers, and 2 were started: resume with servers=1"):
        Snapshots(tmp_path, 2).latest(print)


def test_a_snapshot_without_a_digest_is_damaged(two, tmp_path):
    (tmp_path / "version-000000000002" / "shard-0.json").unlink()
    said = []
    assert (two.latest(said.append), len(said)) == (1, 1)


def test_what_was_never_complete_is_no_snapshot(tmp_path):
    (tmp_path / "version-000000000001").mkdir()
    (tmp_path / "version-000000000001" / ".shard-0.partial").write_bytes(b"half")
    assert Snapshots(tmp_path, 1).latest(print) is None


def test_parts_of_an_earlier_run_and_of_this_one_are_no_snapshot(tmp_path):
    snapshots = Snapshots(tmp_path, 2)
    for version, shard in ((1, 0), (1, 1), (2, 0)):  # It ended before the last file.
        snapshots.write(version, shard, {}, print)
    snapshots.wait()
    assert (snapshots.latest(print), snapshots.newest) == (1, 1)
    snapshots.make_room(2)
    snapshots.write(2, 1, {}, print)
    snapshots.wait()
    assert (snapshots.latest(print), snapshots.newest) == (1, 1)
