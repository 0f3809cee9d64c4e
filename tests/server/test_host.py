"""What becomes of the process that hosts the servers when a worker does not come back, be it the host itself."""

import os
import signal

import pytest
from support.guard import GUARD_SECONDS
from support.processes import CONTEXT

from evenstep.core.supervision import Why
from evenstep.server.host import HostProcess

pytestmark = pytest.mark.multiprocess


def leave(worker, why):
    about = {"number": 0, "seconds": 1.0, "in_loop": False, "doing": ""}
    return {"event": "leave", "worker": worker, "why": why.value, **about}


def be_host(lost, deaf, end):
    """A host with a child that supervises: of two workers one is done, and one was given up and does not come back."""
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    process = os.getpid()
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    host = HostProcess(process, 2, end_seconds=0.0)
    for worker in (0, 1):
        host.tell({"event": "join", "worker": worker, "limit_seconds": 0.0})
    host.tell(leave(1 - lost, Why.DONE))
    host.tell(leave(lost, Why.SILENT))
    end.send(host.absent)
    while not host.absent["lost"]:
        host.look()
    end.send(host.absent)
    while lost == 0 and os.getppid() == process:
        host.look()
    host.look()
    os._exit(0)


@pytest.mark.parametrize(
    ("lost", "deaf", "code"), [(1, False, 0), (0, False, -signal.SIGTERM), (0, True, -signal.SIGKILL)]
)
def test_a_host_is_ended_where_it_is_lost_itself_and_told_of_another(lost, deaf, code):
    end, remote = CONTEXT.Pipe()
    process = CONTEXT.Process(target=be_host, args=(lost, deaf, remote))
    process.start()
    remote.close()
    try:
        assert end.poll(GUARD_SECONDS)
        assert end.recv() == {"awaits": True, "lost": False}
        assert end.poll(GUARD_SECONDS)
        assert end.recv() == {"awaits": False, "lost": True}
        process.join(GUARD_SECONDS)
        assert process.exitcode == code
    finally:
        process.kill()
        process.join()
