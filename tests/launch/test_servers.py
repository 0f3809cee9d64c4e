import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest
from support.guard import GUARD_SECONDS
from support.server_reports import Reports, stand_in

from evenstep.core.errors import ConfigError
from evenstep.launch.server_settings import ServerSettings
from evenstep.launch.servers import Servers
from evenstep.telemetry.events import ServersRestarted

pytestmark = pytest.mark.multiprocess

OWNER = Path(__file__).parent / "owner.py"


@pytest.fixture
def reports():
    with closing(Reports()) as reports:
        yield reports


@pytest.fixture
def start(reports, tmp_path):
    """Starts stand-ins; what the servers recorded is in the queue `recorded`."""

    def start(count, behaviour="good", **settings):
        command = stand_in(reports, behaviour)
        return Servers(
            ServerSettings(count=count, workers=4, snapshots=tmp_path, command=command, **settings), recorded.put
        )

    recorded = queue.Queue()
    start.recorded = recorded
    return start


def test_shard_0_is_started_last_and_told_where_the_others_are(start, reports, tmp_path):
    with start(3, allow=("torch.optim:Rprop",)) as servers:
        got = [reports.next() for _ in range(3)]
        assert sorted(report.told["index"] for report in got[:2]) == [1, 2]
        first = got[2].told
        assert first["index"] == 0
        assert first["shards"] == [list(addresses) for addresses in servers.addresses[1:]]
        assert all(report.told["shards"] == [] for report in got[:2])
        common = {
            "count": 3,
            "workers": 4,
            "listen": "127.0.0.1",
            "port": 0,
            "resume": False,
            "allow": ["torch.optim:Rprop"],
        }
        for report in got:
            assert report.told.items() >= common.items()
            assert report.told["snapshots"] == str(tmp_path)
            assert report.started["secret"] == servers.secret
            assert servers.addresses[report.told["index"]][0] == f"unix:@stand-in-{report.pid}"
    assert len(bytes.fromhex(servers.secret)) == 32


def test_two_runs_have_different_secrets(start):
    with start(1) as one, start(1) as other:
        assert one.secret != other.secret
        assert one.addresses != other.addresses


def test_closing_ends_the_servers_gently_and_leaves_nothing(start, reports):
    before = threading.active_count()
    servers = start(2)
    got = [reports.next() for _ in range(2)]
    servers.close()
    servers.close()
    assert [event["event"] for report in got for event in report.after_listening()] == ["ended", "ended"]
    assert not any(psutil.pid_exists(report.pid) for report in got)
    assert threading.active_count() == before
    assert servers.lost is None
    assert start.recorded.empty()


def test_shard_0_ends_first_since_its_last_snapshot_needs_the_others(start, tmp_path):
    with start(2):
        pass
    assert (tmp_path / "ended").read_text() == "0 1 "


def test_a_server_that_does_not_end_is_killed_and_that_is_said(start, reports):
    with start(1, "stubborn", end_seconds=0.2):
        report = reports.next()
    assert report.after_listening() == [{"event": "asked"}]
    assert not psutil.pid_exists(report.pid)
    event = start.recorded.get_nowait()
    assert event.kind == "server_failed"
    assert event.text == "server 0 was killed by SIGKILL when it was to end: its last snapshot is missing"


def test_a_server_that_ends_badly_is_told_of(start):
    with start(1, "refuses"):
        pass
    assert "server 0 ended with exit code 4 when it was to end" in start.recorded.get_nowait().text


@pytest.mark.parametrize("killed", [0, 1])
def test_when_one_dies_all_start_again_at_their_ports_from_the_last_snapshot(start, reports, killed):
    with start(2) as servers:
        one, zero = reports.next(), reports.next()
        os.kill((zero, one)[killed].pid, signal.SIGKILL)
        event = start.recorded.get(timeout=GUARD_SECONDS)
        text = f"server {killed} was killed by SIGKILL; all start again from their last snapshot (1 of 3)"
        assert event == ServersRestarted(server=killed, restart=1, text=text)
        again = [reports.next(), reports.next()]
        assert [report.told["index"] for report in again] == [1, 0]
        for report in again:
            assert report.told["resume"] is True
            port = report.told["port"]
            assert servers.addresses[report.told["index"]][1] == f"tcp://127.0.0.1:{port}"
            assert report.started["secret"] == servers.secret
        # The others were killed: a last snapshot of theirs would be newer than what the dead one had.
        assert one.after_listening() == zero.after_listening() == []
        assert json.loads(again[1].file.readline()) == {"event": "listening"}
    assert servers.lost is None


def test_a_server_that_is_stopped_is_replaced_as_a_dead_one_after_its_heartbeat(start, reports):
    with start(1, "stops", heartbeat_seconds=0.5) as servers:
        stopped = reports.next()
        event = start.recorded.get(timeout=GUARD_SECONDS)
        assert event.text == "server 0 was silent for 0.5 s; all start again from their last snapshot (1 of 3)"
        assert reports.next().told["resume"] is True
        assert not psutil.pid_exists(stopped.pid)
    assert servers.lost is None


def test_what_shard_0_tells_of_workers_is_passed_on(reports, tmp_path):
    told = queue.Queue()
    settings = ServerSettings(count=1, workers=2, snapshots=tmp_path, command=stand_in(reports, "good"))
    with Servers(settings, print, told.put):
        joins = [told.get(timeout=GUARD_SECONDS) for _ in range(2)]
    assert joins == [{"event": "join", "worker": worker, "limit_seconds": 1.0} for worker in range(2)]


def test_it_gives_up_after_the_restarts_that_it_has(start, reports):
    with start(1, restarts=1) as servers:
        os.kill(reports.next().pid, signal.SIGKILL)
        os.kill(reports.next().pid, signal.SIGSEGV)
        assert start.recorded.get(timeout=GUARD_SECONDS).kind == "servers_restarted"
        event = start.recorded.get(timeout=GUARD_SECONDS)
        assert event.kind == "servers_lost"
        assert event.text == servers.lost == "server 0 was killed by SIGSEGV; no restart is left of 1"


def test_a_restart_that_fails_counts_as_one(start, reports):
    with start(2, "fails-again", restarts=2) as servers:
        os.kill(reports.next().pid, signal.SIGKILL)
        kinds = [start.recorded.get(timeout=GUARD_SECONDS).kind for _ in range(3)]
        assert kinds == ["servers_restarted", "servers_restarted", "servers_lost"]
        assert servers.lost == "server 1 ended with exit code 3; no restart is left of 2"


@pytest.mark.parametrize(
    ("behaviour", "how"),
    [("fails", "server 0 ended with exit code 3"), ("mute", "server 0 did not listen within 10 s")],
)
def test_a_server_that_does_not_come_up_is_an_error_and_none_is_left(start, reports, behaviour, how):
    with pytest.raises(ConfigError, match=f"^{how}, before any worker was started"):
        start(1, behaviour, start_seconds=10.0 if behaviour == "mute" else 60.0)
    report = reports.next()
    report.rest()
    assert not psutil.pid_exists(report.pid)


@contextmanager
def owned(reports, tmp_path, behaviour):
    """Another process that owns two servers: it and what they say; all are gone in the end, whatever a test finds."""
    command = [sys.executable, str(OWNER), str(tmp_path), *stand_in(reports, behaviour)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as owner:
        try:
            got = [reports.next(), reports.next()]
            assert owner.stdout.readline() == b"started\n"
            yield owner, got
        finally:
            if owner.poll() is None:
                for process in [*psutil.Process(owner.pid).children(), owner]:
                    process.kill()


def test_servers_end_by_themselves_when_whoever_started_them_is_killed(reports, tmp_path):
    with owned(reports, tmp_path, "good") as (owner, got):
        owner.kill()
        owner.wait()
    for report in got:
        assert report.after_listening() == [{"event": "ended", "by": "stdin"}]


def test_servers_that_nobody_closed_end_gently_with_the_main_thread(reports, tmp_path):
    program = """
import sys; from pathlib import Path
from evenstep.launch.server_settings import ServerSettings; from evenstep.launch.servers import Servers
settings = ServerSettings(count=1, workers=1, snapshots=Path(sys.argv[1]), command=tuple(sys.argv[2:]))
servers = Servers(settings, print)
"""
    command = [sys.executable, "-c", program, str(tmp_path), *stand_in(reports, "good")]
    ended = subprocess.run(command, capture_output=True, timeout=GUARD_SECONDS, check=True)
    assert ended.stdout == ended.stderr == b""
    assert reports.next().after_listening() == [{"event": "ended", "by": "signal"}]


def test_servers_that_others_use_stay_beyond_the_main_thread_until_they_are_closed(reports, tmp_path):
    program = """
import sys, threading; from pathlib import Path
from evenstep.launch.server_settings import ServerSettings; from evenstep.launch.servers import POLL_SECONDS, Servers
command = tuple(sys.argv[2:])
settings = ServerSettings(count=1, workers=1, snapshots=Path(sys.argv[1]), command=command, until_closed=True)
servers = Servers(settings, print)
def close():
    threading.main_thread().join()
    servers._ended.wait(3 * POLL_SECONDS)  # what must not happen in that time
    print("ended" if servers._ended.is_set() else "there")
    servers.close()
threading.Thread(target=close).start()
"""
    command = [sys.executable, "-c", program, str(tmp_path), *stand_in(reports, "good")]
    ended = subprocess.run(command, capture_output=True, timeout=GUARD_SECONDS, check=True)
    assert ended.stdout == b"there\n"
    assert reports.next().after_listening() == [{"event": "ended", "by": "signal"}]


def test_an_interrupted_close_leaves_the_servers_time_for_their_last_snapshot(reports, tmp_path):
    with owned(reports, tmp_path, "slow") as (owner, got):
        for report in reversed(got):
            owner.send_signal(signal.SIGINT)
            assert [report.next()["event"], report.next()["event"]] == ["listening", "asked"]
            report.let_end()
        assert owner.wait(GUARD_SECONDS) != 0
    assert (tmp_path / "ended").read_text() == "0 1 "


def test_an_interrupted_close_kills_the_servers_and_waits_for_it(reports, tmp_path):
    with owned(reports, tmp_path, "stubborn") as (owner, got):
        owner.send_signal(signal.SIGINT)
        first = got[-1]
        assert [first.next()["event"], first.next()["event"]] == ["listening", "asked"]
        owner.send_signal(signal.SIGINT)
        assert owner.wait(GUARD_SECONDS) != 0
    for report in got:
        report.rest()
        assert not psutil.pid_exists(report.pid)
