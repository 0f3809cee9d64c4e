"""Who computes on which weights, and when it counts: what the simulator decides for a run, as a list of events.

The simulator writes the log of a run on servers. Fed to a coordinator, that log gives the answers and the commits, in
their order. A collective run commits a whole slice of all workers at a time.
"""

from itertools import accumulate
from typing import NamedTuple

from evenstep.core.coordinate import Answer, Apply, Arrival, Coordinator
from evenstep.sim import Log, Scenario, simulate
from evenstep.telemetry import Silent

ALL = 0
"""The worker that stands for all of them in a collective run."""


class Given(NamedTuple):
    """A worker starts on `samples` with the present weights. `stale` and `behind` are those of its last push, or 0."""

    worker: int
    samples: int
    stale: int = 0
    behind: float = 0.0


class Committed(NamedTuple):
    """What these workers have computed counts as one update, at this time in seconds."""

    at: float
    workers: tuple[int, ...]
    share: float = 1.0
    behind: float = 0.0
    stale: int = 0


def schedule(scenario: Scenario):
    """The events of a run: on servers, or behind a barrier in each iteration."""
    return _collective(scenario) if scenario.scheme.served is None else list(_served(scenario))


class Kept:
    """A recorder that keeps the events of some kinds."""

    def __init__(self, *kinds):
        self.kinds, self.events = kinds, []

    def record(self, event):
        if event.kind in self.kinds:
            self.events.append(event)

    def close(self):
        pass


def iterations(scenario):
    """The `iteration` events of each worker."""
    kept = [Kept("iteration") for _ in scenario.cluster.workers]
    simulate(scenario, log=Log(workers=kept, server=Silent()))
    return [each.events for each in kept]


def _collective(scenario):
    of_workers = list(zip(*iterations(scenario), strict=True))
    ends = accumulate(each[0].iteration_seconds for each in of_workers)
    return [
        event
        for each, end in zip(of_workers, ends, strict=True)
        for event in (Given(ALL, sum(one.samples for one in each)), Committed(end, (ALL,)))
    ]


def _served(scenario):
    server = Kept("join", "begin", "push", "rest")
    simulate(scenario, log=Log(workers=[Silent()] * len(scenario.cluster), server=server))
    coordinator = Coordinator(
        sync=scenario.sync, load=scenario.scheme.load, problem=scenario.problem, length=scenario.length,
        drop_last=scenario.drop_last,
    )  # fmt: skip
    latest = {}
    for number, event in enumerate(server.events):
        for command in _decided(coordinator, event, number):
            if isinstance(command, Apply):
                workers = tuple(worker for (worker, _, _), _ in command.pushes)
                latest |= dict.fromkeys(workers, (command.staleness, command.behind))
                yield Committed(event.at, workers, command.share, command.behind, command.staleness)
            elif isinstance(command, Answer) and command.claims:
                (claim,) = command.claims
                yield Given(command.worker, claim.samples, *latest.get(command.worker, (0, 0.0)))


def _decided(coordinator, event, number):
    match event.kind:
        case "join":
            coordinator.join(event.worker)
            return ()
        case "begin":
            return coordinator.begin(event.worker, event.number, event.epoch, event.at, ahead=event.ahead)
        case "rest":
            return coordinator.rest(event.worker, event.at, done=event.done, ended=event.ended)
    key = (event.worker, 0, number)
    arrival = Arrival(key, event.claim, event.pulled, event.samples, event.units, tuple(event.row))
    return coordinator.push(arrival, event.at)
