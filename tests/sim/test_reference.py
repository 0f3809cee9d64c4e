"""Against a simulator of its own kind: no events and no policies, but time in steps of a millisecond."""

import random

import pytest

from evenstep.cluster import parse_cluster

SAMPLES = 8
WORKERS = 5


def reference(milliseconds, bound, until):
    """When each worker pushes, in milliseconds; bound None: never held. `milliseconds[worker][iteration]`."""
    pushed = [[] for _ in milliseconds]
    busy_until = [row[0] for row in milliseconds]
    held = [False] * len(milliseconds)
    for now in range(until):
        for worker in range(len(milliseconds)):
            if not held[worker] and busy_until[worker] == now:
                pushed[worker].append(now)
                held[worker] = True
        slowest = min(map(len, pushed))
        for worker, row in enumerate(milliseconds):
            done = len(pushed[worker])
            if held[worker] and (bound is None or done - slowest <= bound):
                held[worker] = False
                busy_until[worker] = now + row[done % len(row)]
    return pushed


def simulated(run, cluster, scheme, until):
    _, kept, _ = run(cluster, scheme, batch=SAMPLES * WORKERS, iterations=200, logged=True)
    pushes = []
    for recorder in kept:
        begins, times = 0.0, []
        for event in recorder.events:
            if event.kind == "iteration":
                times.append(round((begins + event.compute_seconds) * 1000))
                begins += event.iteration_seconds
        pushes.append([each for each in times if each < until])
    return pushes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("scheme", "bound"),
    [("bsp", 0), ("bsp:engine=server", 0), ("ssp:bound=0", 0), ("ssp:bound=1", 1), ("ssp:bound=4", 4), ("asp", None)],
)
def test_pushes_happen_when_the_reference_says(run, scheme, bound, seed):
    draw = random.Random(seed)
    factors = [[draw.randint(1, 6 + 3 * worker) for _ in range(40)] for worker in range(WORKERS)]
    text = '[devices.one]\nper_sample = "1 ms"\n'
    for worker, row in enumerate(factors):
        text += f'[disturbances.t{worker}]\nkind = "trace"\nfactors = {row}\n'
        text += f'[[workers]]\ndevice = "one"\ndisturb = ["t{worker}"]\n'
    until = 1_500
    expected = reference([[SAMPLES * factor for factor in row] for row in factors], bound, until)
    assert simulated(run, parse_cluster(text), scheme, until) == expected
    assert sum(map(len, expected)) > 50
