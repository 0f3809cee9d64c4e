"""Under plain torchrun the workers of a host learn of their servers past everybody who can reach torchrun's store."""

import json
import os
import stat
import tempfile
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from support import served_scripts
from support.guard import GUARD_SECONDS
from support.processes import CONTEXT, results, run_workers
from torch.distributed import PrefixStore, TCPStore

from evenstep.core.errors import ConfigError
from evenstep.launch.handover import Handover, private_folder, run_of
from evenstep.launch.server_settings import SECRET_VARIABLE, ServerSettings
from evenstep.torch.processes.join_servers import meet_in_store
from evenstep.transport.base import ConnectionLostError
from evenstep.transport.connect import connect

ADDRESSES = (("unix:@here", "tcp://127.0.0.1:1"),)
SECRET = "ab" * 32


@pytest.fixture
def store():
    """A store such as torchrun's agent keeps."""
    return TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where this process puts its temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def environment(store, count, **more):
    return {
        "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "LOCAL_WORLD_SIZE": str(count), **more,
    }  # fmt: skip


def wanted(workers, run_dir=None):
    return ServerSettings(count=1, workers=workers, snapshots=Path("snapshots"), until_closed=True), run_dir, 30.0


def in_store(store):
    """Everything that a stranger who reaches the store's port can read."""
    return b"\n".join(key.encode() + b"=" + store.get(key) for key in store.list_keys()).decode(errors="replace")


@pytest.mark.multiprocess
@pytest.mark.parametrize("given", [None, SECRET])
def test_the_secret_is_in_no_key_of_the_store_and_no_file_is_left(given, store, tmp_path):
    more = {} if given is None else {SECRET_VARIABLE: given}
    workers = environment(store, 3, **more)
    told = results(run_workers(served_scripts.meet_under_torchrun, 3, str(tmp_path), environment=workers))
    assert [each["met"] for each in told] == [[0, 1, 2]] * 3
    # The process of worker 0, which has the servers, stays until the others are done with them.
    assert [each["keeping"] for each in told] == [[False], [], []]
    (secret,) = {each["secret"] for each in told}
    assert secret == given or len(secret) == 64
    seen = in_store(store)
    assert str(tmp_path) in seen  # So the exchange is among what was looked at.
    assert secret not in seen
    for address in told[0]["addresses"][0]:
        assert address not in seen
    assert list(tmp_path.iterdir()) == []


def host_servers(count, told):
    """As worker 0, whose process stays until the others are done with the servers."""
    os.environ.update(told)
    tempfile.tempdir = told["TMPDIR"]
    store = TCPStore("127.0.0.1", int(told["MASTER_PORT"]), None, False)
    meet_in_store(store, 0, *wanted(count))
    threading.Event().wait(GUARD_SECONDS)


@pytest.mark.multiprocess
def test_the_folder_with_the_secret_goes_with_a_worker_0_that_is_killed_before_others_read_it(
    store, tmp_path, monkeypatch
):
    told = environment(store, 2, TMPDIR=str(tmp_path))
    process = CONTEXT.Process(target=host_servers, args=(2, told))
    process.start()
    try:
        path = PrefixStore("evenstep/servers", store).get("addresses/1").decode()
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        handover = Handover.read(path, run_of(os.environ))
        with connect(handover.addresses[0], secret=bytes.fromhex(handover.secret)) as connection:
            process.kill()
            with pytest.raises(ConnectionLostError):  # The server ends after the folder has.
                connection.receive(GUARD_SECONDS)
        assert list(tmp_path.iterdir()) == []
    finally:
        process.kill()
        process.join()


def written(run="a run", **changes):
    folder = private_folder()
    return folder, Handover(**{"addresses": ADDRESSES, "secret": SECRET, "run": run, **changes}).write(
        Path(folder.name)
    )


def test_the_file_is_private_whatever_the_mask_and_says_what_was_written(temporary):
    for mask in (0o000, 0o277):
        before = os.umask(mask)
        try:
            folder, path = written()
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) & 0o077 == 0
        assert Handover.read(str(path), "a run") == Handover(addresses=ADDRESSES, secret=SECRET, run="a run")
        folder.cleanup()
    assert list(temporary.iterdir()) == []


def link_to(path, tmp_path):
    (tmp_path / "link").symlink_to(path)
    return tmp_path / "link"


def pipe_instead(path, tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    return tmp_path / "pipe"


def readable_by_others(path, tmp_path):
    path.chmod(0o644)
    return path


def of_another_user(path, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, 12345)
    return path


def not_there(path, tmp_path):
    return tmp_path / "nowhere"


def no_json(path, tmp_path):
    path.write_text("-----BEGIN PRIVATE KEY-----")
    return path


def without_addresses(path, tmp_path):
    path.write_text(json.dumps({"secret": SECRET, "run": "a run"}))
    return path


def endless(path, tmp_path):
    with path.open("r+") as file:
        file.truncate(1 << 30)
    return path


FORGERIES = {
    link_to: "OSError",
    pipe_instead: "it is not a regular file",
    readable_by_others: "others than its owner have access to it",
    of_another_user: "it belongs to another user",
    not_there: "FileNotFoundError",
    no_json: "DecodeError",
    without_addresses: "ValidationError",
    endless: "it is too large",
}


@pytest.mark.parametrize(("forge", "why"), FORGERIES.items(), ids=lambda part: getattr(part, "__name__", ""))
def test_a_file_that_somebody_else_may_have_written_is_not_believed(forge, why, tmp_path, temporary):
    folder, path = written()
    path = forge(path, tmp_path)
    with pytest.raises(ConfigError) as refused:
        Handover.read(str(path), "a run")
    folder.cleanup()
    assert f"is not used ({why})" in str(refused.value)
    assert "PRIVATE KEY" not in str(refused.value)


def test_a_file_of_another_run_is_not_believed(temporary):
    folder, path = written(run="another")
    with folder, pytest.raises(ConfigError, match=r"is not used \(it is of another run\)"):
        Handover.read(str(path), "a run")


@pytest.mark.parametrize("forged", ["tcp://10.0.0.1:1234", "", "\0", "/dev/zero", "x" * 5000, "\xff\xfe"])
def test_a_stranger_who_writes_into_the_store_first_cannot_lead_a_worker_astray(forged, store, monkeypatch):
    for name, value in environment(store, 2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    PrefixStore("evenstep/servers", store).set("addresses/1", forged)
    with pytest.raises(ConfigError, match="which the store of this run names for its servers, is not used"):
        meet_in_store(store, 1, *wanted(2))


def test_runs_of_a_user_on_one_host_are_told_apart_by_where_they_meet():
    meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert run_of(meets) != run_of({**meets, "MASTER_PORT": "29501"})
    assert run_of(meets) != run_of({**meets, "TORCHELASTIC_RESTART_COUNT": "1"})


def test_beyond_one_host_a_secret_must_be_given_on_every_worker(store, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    for rank in (0, 3):
        with pytest.raises(ConfigError, match="servers beyond one host need a secret: set EVENSTEP_SECRET"):
            meet_in_store(store, rank, *wanted(4, Path("unused")))
