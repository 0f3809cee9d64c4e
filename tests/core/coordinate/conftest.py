"""Workers in front of a coordinator: what happens is told in words, one line for each command."""

import numpy as np
import pytest
from support.watched_sync import WatchedSync

from evenstep.core.coordinate import Answer, Arrival, Coordinator, Given
from evenstep.core.load import Equal
from evenstep.core.samples.pass_costs import PassCosts
from evenstep.core.sync import Regroup
from evenstep.core.values import UNLIMITED, Problem


class Run:
    """A coordinator with workers that push what they were given, first come first.

    Commands are told as `0: 0-4 5-8` (worker 0 is given two claims of these positions), `0 also: 8-12` (one more, while
    it computes), `0: nothing`, `0: over`, and `commit 0+1` (their pushes as one).
    """

    def __init__(
        self, sync, *, workers=2, batch=8, length=16, minimum=1, maximum=UNLIMITED, load=None, costs=None, **more
    ):
        self.costs = None if costs is None else PassCosts.of(np.array(costs), 10)  # In tenths of an average sample.
        length = length if costs is None else len(costs)
        limits = np.ones(workers, dtype=np.int64)
        problem = Problem(global_batch_size=batch, minimum=limits * minimum, maximum=limits * maximum)
        self.coordinator = Coordinator(
            sync=WatchedSync(sync), load=load or Equal(), problem=problem, length=length, **more
        )
        self.now = 0.0
        self.updates = []
        self.releases = []
        self.positions = []
        self.held = {}
        self._versions = {}
        self._sequence = 0

    def join(self, *workers):
        for worker in workers:
            self.coordinator.join(worker)
            self.held[worker] = []

    def begin(self, *workers, number=0, epoch=None, ahead=0):
        """They join too, if they are not here."""
        told = []
        self.join(*(worker for worker in workers if worker not in self.held))
        for worker in workers:
            self.held[worker] = []
            epoch = number if epoch is None else epoch
            told += self.told(self.coordinator.begin(worker, number, epoch, self.now, ahead=ahead, costs=self.costs))
        return told

    def push(self, *workers, skips=0, samples=None, version=None, row=(1, 1, 0, UNLIMITED)):
        told = []
        for worker in workers:
            claim = self.held[worker][skips]
            self._sequence += 1
            arrival = Arrival(
                key=(worker, 0, self._sequence),
                claim=claim.number,
                version=self._versions[worker] if version is None else version,
                samples=claim.samples if samples is None else samples,
                units=claim.samples,
                row=row,
            )
            commands = self.coordinator.push(arrival, self.now)
            self.positions += claim.positions
            del self.held[worker][: skips + 1]
            told += self.told(commands)
        return told

    def more(self, worker, ahead=1):
        return self.told(self.coordinator.more(worker, ahead))

    def rest(self, *workers, done=None, **more):
        """With `done` claims that it holds computed or skipped."""
        told = []
        for worker in workers:
            number = self.held[worker][done - 1].number if done else None
            self.held[worker] = []
            told += self.told(self.coordinator.rest(worker, self.now, done=number, **more))
        return told

    def stop(self, worker):
        self.held[worker] = []
        return self.told(self.coordinator.stop(worker, self.now))

    def leave(self, worker):
        self.held.pop(worker, None)
        return self.told(self.coordinator.leave(worker, self.now))

    def told(self, commands):
        return [self._line(command) for command in commands]

    def _line(self, command):
        if isinstance(command, Regroup):
            return f"groups {command.groups}"
        if not isinstance(command, Answer | Given):
            self.updates.append(command)
            return "commit " + "+".join(str(key[0]) for key, _ in command.pushes)
        self.held[command.worker] += command.claims
        pieces = " ".join(f"{start}-{stop}" for claim in command.claims for start, stop in claim.ranges) or "nothing"
        if isinstance(command, Given):
            return f"{command.worker} also: {pieces}"
        self._versions[command.worker] = command.version
        self.releases.append(command.release)
        return f"{command.worker}: " + ("over" if command.over else pieces)


@pytest.fixture(name="Run")
def run_fixture():
    return Run
