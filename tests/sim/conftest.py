"""Clusters in a line, and recorders that keep what they are given."""

import pytest

from evenstep.cluster import parse_cluster
from evenstep.schemes import Scheme, parse_scheme
from evenstep.sim import Log, Scenario, simulate
from evenstep.telemetry import Event, Silent


class Kept:
    """A recorder whose events stay in memory."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def device_text(*per_sample_ms, fixed_ms=0, more="", disturb="", worker="", seed=5):
    """The text of a cluster file with one worker for each time, in milliseconds per sample."""
    lines = [f"seed = {seed}"]
    for number, milliseconds in enumerate(per_sample_ms):
        lines += [f"[devices.d{number}]", f'per_sample = "{milliseconds} ms"', f'fixed = "{fixed_ms} ms"']
    for number in range(len(per_sample_ms)):
        lines += ["[[workers]]", f'device = "d{number}"', f"disturb = [{disturb}]", worker]
    return "\n".join([*lines, more])


@pytest.fixture
def devices():
    """A cluster with one worker for each time in milliseconds per sample."""
    return lambda *times, **keys: parse_cluster(device_text(*times, **keys))


@pytest.fixture
def run():
    """Simulates; returns the result, and each worker's events where they are asked for."""

    def run(cluster, scheme, *, logged=False, batch=None, iterations=100, **more):
        scheme = scheme if isinstance(scheme, Scheme) else parse_scheme(scheme)
        scenario = Scenario(
            cluster=cluster,
            scheme=scheme,
            global_batch_size=batch or 16 * len(cluster),
            iterations=iterations,
            **more,
        )
        if not logged:
            return simulate(scenario)
        kept = [Kept() for _ in range(len(cluster))]
        server = Kept() if scenario.scheme.served else Silent()
        result = simulate(scenario, log=Log(workers=kept, server=server))
        return result, kept, server

    return run
