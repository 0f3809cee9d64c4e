"""A server that dies is started again from the last snapshot, and the workers go on from there."""

import sys
from pathlib import Path

import numpy as np
import pytest
from support import served_faults, served_training
from support.processes import results, run_workers
from support.served import environment, server_events
from support.training import Run

from evenstep.launch.server_settings import ServerSettings
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
