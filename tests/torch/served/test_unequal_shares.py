"""Pushes of very unequal sizes train as whole batches do: a small one is no more in momentum than it is in a sum."""

import pytest
from support import unequal_training
from support.processes import results, run_workers
from support.served import run_served

from evenstep.cluster import parse_cluster

# Of a global batch of 64 the small device holds 2, which it is done with many times while the large one computes on 62.
CLUSTER = parse_cluster("""
[devices.large]
per_sample = "0.2 ms"
[devices.small]
per_sample = "0.1 ms"
largest_batch = 2
[[workers]]
device = "large"
[[workers]]
device = "small"
""")
GUESSING = 2.3
"""The loss of who guesses one kind of ten: ln 10."""

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("unequal_shares")]


@pytest.fixture(scope="module")
def barrier_loss():
    """Under a barrier, where every commit is a whole batch."""
    losses, sizes = zip(*results(run_workers(unequal_training.train, 2, "bsp", CLUSTER)), strict=True)
    assert [max(each) for each in sizes] == [62, 2]
    assert losses[0] == losses[1] < GUESSING / 100
    return losses[0]


@pytest.mark.parametrize(("scheme", "servers"), [("asp", 1), ("ssp:bound=3", 1), ("dssp:servers=2", 2)])
def test_momentum_trains_on_unequal_pushes_as_on_whole_batches(tmp_path, scheme, servers, barrier_loss):
    outcomes = run_served(unequal_training.train, 2, scheme, CLUSTER, run_dir=tmp_path, servers=servers)
    losses, sizes = zip(*results(outcomes), strict=True)
    assert [max(each) for each in sizes] == [62, 2]
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(barrier_loss, abs=GUESSING / 50)
