"""A server that dies is started again from the last snapshot, and the workers go on from there."""

import os
import secrets
import sys
from pathlib import Path

import numpy as np
import pytest
from support import served_faults, served_training, training
from support.faults import meeting_place
from support.processes import results, run_workers
from support.served import environment, run_served, server_events
from support.training import Run

from evenstep.core.errors import ConfigError
from evenstep.launch.launch_settings import LaunchSettings
from evenstep.launch.server_settings import SECRET_VARIABLE, ServerSettings
from evenstep.launch.servers import Servers
from evenstep.torch.processes.join_servers import restarted

pytestmark = pytest.mark.multiprocess

DYING = Path(served_faults.__file__).parent / "dying_server.py"


def test_a_server_that_is_killed_is_restarted_and_no_sample_is_lost(tmp_path):
    servers, dies, number = 2, 1, 9  # Of 6 commits an epoch.
    run = Run(scheme="bsp:engine=server,servers=2", samples=77, epochs=3)
    events = []
    settings = ServerSettings(
        count=servers,
        workers=3,
        snapshots=tmp_path / "snapshots",
        command=(sys.executable, str(DYING), str(dies), str(number)),
    )
    with Servers(settings, events.append) as started:
        told = environment(started.addresses, started.secret, tmp_path, network=True)
        values = results(run_workers(served_faults.train, 3, run, tmp_path, -1, {}, environment=told))
    assert [event.kind for event in events] == ["servers_restarted"]
    assert events[0].server == dies
    (restored,) = server_events(tmp_path, "restored")
    # How many that is depends on what the workers had been given when it died; some have been given at least one.
    assert max(event.commits for event in server_events(tmp_path, "lost")) >= 1
    # What counts of the second epoch was pushed to the servers that were started again.
    events = server_events(tmp_path)
    joined = {event.incarnation for event in events[events.index(restored) :] if event.kind == "join"}
    assert served_faults.pushed(tmp_path, only={1: joined}) == {epoch: list(range(77)) for epoch in range(3)}
    assert values[0]["ended"] == values[1]["ended"] == values[2]["ended"]
    assert restored.version == 6
    np.testing.assert_allclose(values[0]["ended"], served_training.train_alone(run, 15), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("kept", "then"), [(True, "goes on from the servers' last snapshot"), (False, "starts over")])
def test_workers_that_torchrun_starts_again_go_on_where_a_snapshot_was_kept(kept, then, capfd):
    assert not restarted({}, kept=kept)
    assert not restarted({"TORCHELASTIC_RESTART_COUNT": "0"}, kept=kept)
    assert restarted({"TORCHELASTIC_RESTART_COUNT": "1"}, kept=kept)
    said = capfd.readouterr().err
    assert said.startswith(f"evenstep: the workers were started again, and the run {then}")
    assert said.count("\n") == 1


ALL_WAIT = Run(scheme="bsp:engine=server,servers=2", samples=60, epochs=3)
"""Of 6 commits an epoch, on 2 workers: snapshots of the versions 12 and 18 are left."""


def train_to_the_end():
    model, optimizer, loader = training.prepared(ALL_WAIT)
    with loader:
        for _ in range(loader.epoch, ALL_WAIT.epochs):
            for inputs, targets in loader:
                training.step(model, optimizer, inputs, targets)
        return training.weights(model)


def trained(run_dir, **settings):
    """Worker 0's weights at the end."""
    return results(run_served(train_to_the_end, 2, run_dir=run_dir, servers=2, **settings))[0]


def shards(run_dir, version):
    return [run_dir / "snapshots" / f"version-{version:012}" / f"shard-{shard}.pt" for shard in range(2)]


def test_a_run_goes_on_from_the_newest_version_that_all_servers_have(tmp_path):
    weights = trained(tmp_path)
    left, lost = shards(tmp_path, 18)
    lost.unlink()
    stray = tmp_path / "snapshots" / "version-000000000100" / "shard-0.pt"
    stray.parent.mkdir()
    stray.write_bytes(b"of another host")
    left.write_bytes(b"of a server that was ahead")
    assert trained(tmp_path, resume=True) == weights
    assert [event.version for event in server_events(tmp_path, "restored")] == [12]
    assert stray.read_bytes() == b"of another host"
    # Both are of this run now.
    assert trained(tmp_path, resume=True) == weights
    assert [event.version for event in server_events(tmp_path, "restored")] == [12, 18]


def test_where_no_version_is_complete_nothing_begins_anew(tmp_path, capfd):
    snapshots = tmp_path / "snapshots"
    for shard in (0, 1):
        path = snapshots / f"version-{shard:012}" / f"shard-{shard}.pt"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"part")
    settings = ServerSettings(count=2, workers=2, snapshots=snapshots, resume=True)
    with pytest.raises(ConfigError, match="before any worker was started: its output above tells why"):
        Servers(settings, print)
    assert f"evenstep: server 0: no snapshot in {snapshots} is complete on this host: resume" in capfd.readouterr().err
    assert [path.read_bytes() for path in sorted(snapshots.rglob("*.pt"))] == [b"part", b"part"]


def prepare_on_a_host_of_its_own(folder):
    """What this worker was refused with; the run directory is another one on each host."""
    rank = os.environ["RANK"]
    launched = LaunchSettings(run_dir=str(folder / rank), resume=True)
    os.environ.update(launched.to_environment())
    try:
        *_, loader = training.prepared(ALL_WAIT)
    except ConfigError as error:
        return str(error)
    loader.close()


def test_hosts_whose_snapshots_are_of_other_versions_say_so(tmp_path):
    trained(tmp_path)
    (tmp_path / "snapshots").rename(tmp_path / "kept")
    for rank, versions in enumerate([(12,), (12, 18)]):
        for version in versions:
            name = f"version-{version:012}"
            (tmp_path / str(rank) / "snapshots").mkdir(parents=True, exist_ok=True)
            (tmp_path / str(rank) / "snapshots" / name).symlink_to(tmp_path / "kept" / name)
    told = {**meeting_place(), "LOCAL_WORLD_SIZE": "1", SECRET_VARIABLE: secrets.token_hex(32)}
    # Worker 0 waits for the other, whose launcher would end both.
    refused = run_workers(prepare_on_a_host_of_its_own, 2, tmp_path, environment=told, stopped=[0])[1].value
    assert "is version 18 on the host of worker 1 and version 12 on that of worker 0" in (refused or "")
