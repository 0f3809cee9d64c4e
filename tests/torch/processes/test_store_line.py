import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
from support.guard import GUARD_SECONDS
from torch.distributed import TCPStore

from evenstep.core.errors import WorkerLostError
from evenstep.torch.processes.store_line import StoreLine

pytestmark = pytest.mark.multiprocess

KEEPER = """
import sys
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def keeper():
    command = [sys.executable, "-c", KEEPER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.fixture
def store(keeper):
    return TCPStore(
        "127.0.0.1", int(keeper.stdout.readline()), timeout=timedelta(seconds=GUARD_SECONDS), wait_for_workers=False
    )


def stop(keeper):
    keeper.send_signal(signal.SIGSTOP)
    with open(f"/proc/{keeper.pid}/stat") as file:
        while file.read().rpartition(")")[2].split()[0] != "T":
            file.seek(0)


def serving():
    return [thread for thread in threading.enumerate() if thread.name == "evenstep-store"]


def test_no_call_is_under_way_once_a_line_to_a_stopped_store_is_closed(keeper, store, capfd):
    line = StoreLine(store)
    assert line.call(lambda own: own.check(["a"]), GUARD_SECONDS) is False
    stop(keeper)
    made = line.ask(lambda own: own.check(["a"]))
    later = line.ask(lambda own: own.check(["a"]))
    line.close()
    assert serving() == []
    for each in (made, later):
        assert isinstance(each.exception(), WorkerLostError)
    assert capfd.readouterr().err == ""


def test_only_the_lines_own_connection_is_cut(keeper, store):
    line = StoreLine(store)
    line.call(lambda own: own.check(["a"]), GUARD_SECONDS)
    with socket.create_connection(("127.0.0.1", store.port)) as other:
        stop(keeper)
        line.ask(lambda own: own.check(["a"]))
        line.close()
        keeper.send_signal(signal.SIGCONT)
        store.set("b", "c")
        assert store.get("b") == b"c"
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.recv(1)
