"""A process that is forked while the garbage of a closed run is about leaves it alone."""

import gc
import os
import select
import signal

import pytest
import torch
import torch.distributed as dist
from support.guard import GUARD_SECONDS
from support.processes import results, run_workers

from evenstep.torch.processes.join_workers import join_workers


class Kept:
    """Holds itself and a connection."""

    def __init__(self, work):
        self.myself, self.work = self, work


def collect_in_a_fork():
    """The exit status of a fork that collects all garbage, and whether this process still collects its own."""
    workers = join_workers(torch.device("cpu"), GUARD_SECONDS)
    gc.disable()
    kept = Kept(dist.all_reduce(torch.ones(1), group=workers.host_group, async_op=True))
    kept.work.wait()
    workers.leave()
    del workers, kept
    gc.enable()
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(7 if gc.isenabled() and gc.get_freeze_count() else 8)
    return os.waitstatus_to_exitcode(ended(child)), gc.isenabled(), gc.collect() > 0


def ended(child):
    """The child's status; it is killed if it hangs."""
    watched = os.pidfd_open(child)
    if not select.select([watched], [], [], GUARD_SECONDS)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(watched)
    return os.waitpid(child, 0)[1]


@pytest.mark.multiprocess
def test_a_fork_does_not_close_the_connections_of_its_parent():
    for outcome in results(run_workers(collect_in_a_fork, 2)):
        assert outcome == (7, True, True)
