"""What a server does when the disk or another server fails it."""

import pytest
from support import served_faults
from support.served import run_served, server_events, serving
from support.training import Run

from evenstep.core.errors import WorkerLostError
from evenstep.telemetry import read_events
from evenstep.telemetry.events import SnapshotFailed
from evenstep.transport.connect import connect
from evenstep.worker.servers.link import ServerLink

pytestmark = pytest.mark.multiprocess


def test_a_disk_that_takes_no_snapshot_is_told_once_and_stops_nobody(tmp_path, capfd):
    (tmp_path / "snapshots").write_text("a file where the snapshots are to go")
    run = Run(scheme="ssp:bound=2,servers=2", samples=77, epochs=3)
    outcomes = run_served(served_faults.train, 3, run, tmp_path, -1, {}, servers=2, run_dir=tmp_path)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert served_faults.pushed(tmp_path) == {epoch: list(range(77)) for epoch in range(3)}
    failed = read_events(tmp_path, kind=SnapshotFailed, role="server")
    assert [event.server for event in failed] == [0, 1]
    said = capfd.readouterr().err
    assert said.count("no snapshot can be written") == said.count("server 1 can write no snapshot") == 1


def test_incarnations_of_two_servers_differ(tmp_path):
    run = Run(scheme="asp", samples=16, epochs=1)
    joined = []
    for name in ("one", "other"):
        folder = tmp_path / name
        folder.mkdir()
        run_served(served_faults.train, 2, run, folder, -1, {}, run_dir=folder)
        joined.append({event.incarnation for event in server_events(folder, "join")})
    assert not joined[0] & joined[1]


def test_a_worker_that_has_waited_for_the_others_says_who_is_missing(tmp_path):
    settings = {"snapshots": str(tmp_path / "snapshots"), "count": 1, "workers": 3}
    with serving(settings, 1) as (addresses, secret):
        link = ServerLink(1, lambda _: connect(addresses[0], secret=bytes.fromhex(secret)), 1, timeout_seconds=0.5)
        with pytest.raises(WorkerLostError, match="missing: 0, 2"):
            link.meet(b"mine")
        link.close()
