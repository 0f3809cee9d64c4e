"""A cluster in virtual time that any sync policy can hold back: a heap of workers with given compute seconds."""

from dataclasses import dataclass, field
from heapq import heappop, heappush

import pytest

from evenstep.core.sync import Push, Release
from evenstep.testing.watched import Watched


@dataclass
class Run:
    """What happened: each release with its time and the pushes that its worker had made; `watched` has the sums."""

    releases: list = field(default_factory=list)  # of (seconds, worker, pushes before it)
    commands: list = field(default_factory=list)
    seconds: float = 0.0
    watched: Watched | None = field(default=None, compare=False)

    def waiting_share(self, worker):
        return self.watched.held_seconds[worker] / self.seconds


def drive(policy, compute_seconds, workers, until):
    """Run until this time; `compute_seconds(worker, iteration)` says how long each iteration takes."""
    watched, done, running, run = Watched(policy), [0] * workers, [], Run(seconds=until)

    def carry_out(now, commands):
        run.commands += commands
        for release in (command for command in commands if isinstance(command, Release)):
            worker = release.worker
            run.releases.append((now, worker, done[worker]))
            heappush(running, (now + compute_seconds(worker, done[worker]), worker))

    for worker in range(workers):
        carry_out(0.0, watched.on_join(worker, 0.0))
    while running[0][0] <= until:
        now, worker = heappop(running)
        push = Push(worker=worker, iteration=done[worker], samples=8, units=8, share=1 / workers, version=0)
        done[worker] += 1
        carry_out(now, watched.on_push(push, now))
    run.watched = watched
    return run


@pytest.fixture(name="drive")
def drive_fixture():
    return drive
